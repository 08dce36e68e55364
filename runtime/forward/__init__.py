"""One ragged batch through the model: on one thread, on several, as CUDA graphs. Knows no requests."""
