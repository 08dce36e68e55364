"""Where niwaki-tiny lies, the model that ships with the package. What makes and measures it: runtime/bundled."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parents[1] / "bundled" / "niwaki-tiny"
