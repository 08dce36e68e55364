"""How the kernels are cut: block sizes, warps and stages by shape, from what was measured on this kind of GPU.

A shape that nobody measured gets the default of its kind, always the same. `python -m niwaki.kernels.check --tune`
measures, and writes `triton-<GPU>.json` into niwaki's cache folder, where it is found again; nothing is measured while
a model runs, so a run is as it was before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Tuning:
    block_m: int  # rows of a product; at least what the shape needs
    block_n: int  # keys, or columns, at a time
    num_warps: int
    num_stages: int  # loads in flight ahead of the products
    block_k: int = 64  # the inner side of a grouped product

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_power = isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0
            if name != "num_stages" and not is_power:
                raise ValueError(f"{name} must be a power of two, got {value!r}")
        if self.block_m < 16 or self.block_n < 16 or self.block_k < 16 or self.block_n > 128:
            raise ValueError(f"blocks must be at least 16, block_n at most 128, got {self}")


# Chosen by arithmetic for Hopper's 228 KB of shared memory and 64k registers; none was measured yet.
DEFAULTS: dict[str, Tuning] = {
    "prefill": Tuning(block_m=128, block_n=64, num_warps=8, num_stages=3),
    "split": Tuning(block_m=32, block_n=64, num_warps=4, num_stages=3),
    "decode": Tuning(block_m=16, block_n=64, num_warps=4, num_stages=3),
    "tree": Tuning(block_m=64, block_n=64, num_warps=4, num_stages=3),
    "coded_few": Tuning(block_m=16, block_n=64, num_warps=4, num_stages=4),
    "coded": Tuning(block_m=64, block_n=128, num_warps=8, num_stages=3),
    "moe_few": Tuning(block_m=16, block_n=64, num_warps=4, num_stages=4, block_k=128),
    "moe_coded_few": Tuning(block_m=16, block_n=64, num_warps=4, num_stages=4),
    "moe_coded": Tuning(block_m=64, block_n=128, num_warps=8, num_stages=3),
    "moe": Tuning(block_m=64, block_n=128, num_warps=8, num_stages=3, block_k=64),
}

# Attention over heads of 64 channels or more in float32, which no matrix unit takes: cut as above a block would spill
# tens of kilobytes of registers, and of 256 channels want more shared memory than there is.
EXACT = Tuning(block_m=32, block_n=32, num_warps=8, num_stages=2)

# Attention of prompts over heads of 65 to 128 channels in 16 bits. In blocks of 64 keys a multiprocessor starts 846
# instructions of a warp for 128 keys, in one of 128 keys 637 (counted in the machine code), which is time that its
# matrix unit waits; and the product with the keys reads as fast from shared memory as that can be read. Over 8 bits,
# that are widened in registers, blocks of 128 would spill; of 64 channels two blocks of 64 keys run side by side.
LONG = Tuning(block_m=128, block_n=128, num_warps=8, num_stages=2)

# Over heads of more than 128 channels in fewer bits: cut as above a block would spill, or leave no room for a second.
WIDE: dict[str, Tuning] = {
    "prefill": Tuning(block_m=128, block_n=32, num_warps=8, num_stages=3),
    "split": Tuning(block_m=32, block_n=32, num_warps=4, num_stages=3),
    "decode": Tuning(block_m=16, block_n=32, num_warps=4, num_stages=3),
    "tree": Tuning(block_m=64, block_n=32, num_warps=8, num_stages=3),
}


def key_of(kind: str, shape: Mapping[str, int]) -> str:
    return f"{kind}({', '.join(f'{name}={value}' for name, value in sorted(shape.items()))})"


def tuning_for(kind: str, device: torch.device, **shape: int) -> Tuning:
    """What was measured for this shape on this GPU, else the default of its kind."""
    return _tuning(kind, device, tuple(shape.items()))


@lru_cache(maxsize=1024)  # in the path of each launch: the name of the file alone takes as long as starting a kernel
def _tuning(kind: str, device: torch.device, sides: tuple[tuple[str, int], ...]) -> Tuning:
    shape = dict(sides)
    if device.type == "cuda":
        found = _measured(tuning_file(device)).get(key_of(kind, shape))
        if found is not None:
            return found
    if shape.get("bits") == 32 and shape["head_dim"] >= 64:
        return EXACT
    if kind == "prefill" and shape.get("bits") == 16 and 64 < shape["head_dim"] <= 128:
        return LONG
    return WIDE[kind] if shape.get("head_dim", 0) > 128 else DEFAULTS[kind]


def tuning_file(device: torch.device) -> Path:
    """Where the measurements of this kind of GPU are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "niwaki"
    gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device).lower())
    return folder / f"triton-{gpu}.json"


def save(path: Path, measured: Mapping[str, Tuning]) -> None:
    """Keep measurements beside those already there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {**load(path), **measured}
    path.write_text(json.dumps({key: asdict(tuning) for key, tuning in sorted(kept.items())}, indent=2) + "\n", "utf-8")
    _measured.cache_clear()
    _tuning.cache_clear()


def load(path: Path) -> dict[str, Tuning]:
    """Raises ValueError, naming the file, where it is not what `save` writes; empty where none can be read."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        return {key: Tuning(**fields) for key, fields in raw.items()}
    except OSError:  # nothing was measured, or the home is another user's
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold tunings ({error}); delete it, or measure again") from error


@lru_cache(maxsize=8)
def _measured(path: Path) -> dict[str, Tuning]:
    return load(path)
