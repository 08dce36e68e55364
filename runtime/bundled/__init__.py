"""niwaki-tiny, the model that ships with the package: its folder, and the scripts that make and measure it."""

from niwaki.runtime.checkpoint.bundled import MODEL_DIR

__all__ = ["MODEL_DIR"]
