"""From logits to tokens, on the host or where the logits are."""
