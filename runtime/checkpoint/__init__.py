"""What a model's folder holds: config and weights, tokenizer and chat template, a digest; where the bundled one is."""
