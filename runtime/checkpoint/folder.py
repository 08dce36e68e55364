"""Whether a path is a model folder at all, told before anything heavy is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from niwaki.runtime.api import ModelError


def check_is_folder(path: Path) -> None:
    """Raises ModelError: it is none; what looks like a name on Hugging Face's hub is told how to become one."""
    if path.is_dir():
        return
    what = "is a file, not a folder" if path.exists() else "does not exist"
    is_name = not path.exists() and re.fullmatch(r"[\w-]+/[\w.-]+", str(path)) is not None
    hint = f"; nothing is downloaded: hf download {path} --local-dir FOLDER gets a model of that name" * is_name
    hint += "; GGUF is not read, the checkpoint that it was made of is" * (path.suffix.lower() == ".gguf")
    raise ModelError(f"model folder {path} {what}; give a folder with config.json and model.safetensors{hint}")
