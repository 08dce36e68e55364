"""Which weights a model folder holds, told without loading them: for files that outlive the process that wrote them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from niwaki.runtime.api import ModelError
from niwaki.runtime.checkpoint import bundled
from niwaki.runtime.checkpoint.folder import check_is_folder


def weights_fingerprint(folder: Path | None) -> bytes:
    """Tells the weights of one model folder (None: the bundled one) from those of another: the files' names, sizes,
    headers and samples.

    Sixteen pieces of each file are read and not all of it, which would take a minute for a large model.

    Raises:
        ModelError: there is no such folder, or no model in it.
    """
    path = bundled.MODEL_DIR if folder is None else folder
    check_is_folder(path)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json")
    digest = hashlib.blake2b(digest_size=16)
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for part in range(16):
                content.seek(part * size // 16)
                digest.update(content.read(65_536))
    return digest.digest()
