"""Which tensors lie where in the safetensors files of a model folder, told from their headers; and its JSON files.

Every offset is checked against the file's size before a byte of weights is read. Loads no torch: a server's own process
tells by this what is wrong with a folder before its engine can.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from niwaki.runtime.api import ModelError
from niwaki.runtime.checkpoint.folder import check_is_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of 100,000 tensors is below 16 MB
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # torch's names of them
PACKED_BYTES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}  # of parts of weights that are stored in fewer bits
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2} | PACKED_BYTES

PIECE = 1 << 24  # bytes that are compared at a time

# What weights come in besides, by the ends of files, and what is to be said of it.
TRANSLATE = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) of transformers does so"
HINTS = {
    "adapter_model.safetensors": "is an adapter: merge it into the model that it was made for first",
    "consolidated*.safetensors": "has its makers' names; take the folder in Hugging Face's format",
    "*.safetensors": f"is no part of an index; if it is the whole model, call it {SINGLE}",
    "*.gguf": "is a file of llama.cpp; take the folder that it was made from",
    "*.bin": f"holds pickled code, convert it to safetensors: {TRANSLATE}",
    "*.pth": "holds pickled code; take the folder in Hugging Face's format",
    "*.pt": "holds pickled code; take the folder in Hugging Face's format",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `size` bytes from `offset` on in `file`."""

    name: str
    file: Path
    dtype: str  # one of ITEM_BYTES
    shape: tuple[int, ...]
    offset: int
    size: int


def check_folder(path: Path) -> None:
    """Raises ModelError: it is no folder of a model, or its weights are missing, cut short or malformed."""
    check_is_folder(path)
    read_json_object(path / "config.json")
    stored_tensors(path)


def has_weights(path: Path) -> bool:
    """Whether a folder has the files that `stored_tensors` reads."""
    return (path / SINGLE).exists() or (path / INDEX).exists()


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of all files of a folder, by name.

    Raises:
        ModelError: a file is missing, truncated or malformed, or the index does not tell what is in it.
    """
    tensors: dict[str, StoredTensor] = {}
    for file, names in _shards(path).items():
        found = read_safetensors_header(file)
        for name in names or ():
            if name not in found:
                raise ModelError(f"{file} lacks the tensor {name} that the index places there")
        for name, tensor in found.items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in both {tensors[name].file.name} and {file.name} of {path}")
            tensors[name] = tensor
    return tensors


def are_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        sizes = [PIECE] * (one.size // PIECE) + [one.size % PIECE]
        return all(first.read(size) == second.read(size) for size in sizes)


def float_dtype(tensors: Mapping[str, StoredTensor]) -> str | None:
    """That of the first one in floats, by torch's name."""
    return next((FLOAT_DTYPES[tensor.dtype] for tensor in tensors.values() if tensor.dtype in FLOAT_DTYPES), None)


def read_safetensors_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose bytes they cover exactly, without gap or overlap.

    Format: 8 bytes little-endian header size, the header as JSON (name -> dtype, shape, data_offsets), the data.

    Raises:
        ModelError: naming the file and what is wrong with it.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_JSON_BYTES, size - 8):
                raise ModelError(f"{file} is no safetensors file, or is cut short: {size} bytes, header of {length}")
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    tensors: dict[str, StoredTensor] = {}
    for name, entry in _json_object(text, file).items():
        if name != "__metadata__":
            tensors[name] = _stored_tensor(file, name, entry, 8 + length)
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            raise ModelError(f"{file}: tensor {name} starts at byte {tensor.offset}, expected {end}")
        end += tensor.size
    if end != size:
        raise ModelError(f"{file} has {size} bytes but its header describes {end}; the download may be incomplete")
    return tensors


def read_json_object(file: Path) -> dict[str, object]:
    """A JSON file that holds one object.

    Raises:
        ModelError: it is missing, too large, not JSON, or not an object.
    """
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{file} is larger than {MAX_JSON_BYTES} bytes")
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{file.name} is missing in {file.parent}; is this a Hugging Face model folder?") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    return _json_object(text, file)


def _json_object(text: bytes, file: Path) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested thousands deep
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _stored_tensor(file: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(side, int) and not isinstance(side, bool) and side >= 0 for side in shape
        ):
            pass
        case _:
            raise ModelError(f"{file}: the header's entry of {name} is malformed: {str(entry)[:200]}")
    if dtype not in ITEM_BYTES:
        raise ModelError(f"{file}: {unsupported_dtype(name, dtype)}")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if begin < 0 or end - begin != size:
        raise ModelError(f"{file}: {name} of {dtype} {shape} takes {size} bytes, its offsets say {begin} to {end}")
    return StoredTensor(name, file, dtype, tuple(shape), data_start + begin, size)


def _shards(path: Path) -> dict[Path, list[str] | None]:
    """Each weight file, with the tensors that the index places there (None: no index)."""
    single, index = path / SINGLE, path / INDEX
    if single.exists():
        return {single: None}
    if not index.exists():
        raise ModelError(f"{path} has neither {SINGLE} nor {INDEX}{_hint(path)}")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    files: dict[Path, list[str] | None] = {}
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise ModelError(f"{index} places {name} in {file_name!r}, which is no safetensors file of this folder")
        if not (path / file_name).exists():
            raise ModelError(f"{path / file_name}, named by {index.name}, is missing")
        names = files.setdefault(path / file_name, [])
        assert names is not None, "all files of an index have name lists"
        names.append(name)
    return files


def _hint(path: Path) -> str:
    """What else is there, if anything, and what to do about it."""
    for pattern, hint in HINTS.items():
        files = sorted(file.name for file in path.glob(pattern))
        if files:
            return f"; {files[0]} {hint}"
    return ""


def unsupported_dtype(name: str, dtype: str) -> str:
    return f"{name} has the dtype {dtype}; supported: {', '.join(FLOAT_DTYPES)}"
