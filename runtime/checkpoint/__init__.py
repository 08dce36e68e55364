"""What a model's folder holds: its config and weights, its tokenizer and chat template, a digest of it."""
