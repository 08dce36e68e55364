"""niwaki-tiny, the model that ships with the package: its folder, and the scripts that make and measure it."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "niwaki-tiny"

__all__ = ["MODEL_DIR"]
