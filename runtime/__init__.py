"""Time and tensors: requests, scheduling, models, sampling and constraints."""
