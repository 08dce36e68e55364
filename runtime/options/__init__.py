"""What may be asked for: the engine's options, sampling options as dicts say them, and what a pool can hold."""
