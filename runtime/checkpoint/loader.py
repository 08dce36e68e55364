"""Opens a Hugging Face model folder: its config, its generation defaults, and its safetensors files, all checked.

Reads data only: no code comes from the folder, and every offset is checked against the file's size before a byte of
weights is read. Knows nothing of how a model computes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from niwaki.kernels.coded import Coded
from niwaki.kernels.ops import Weight
from niwaki.kernels.small_kv import knows_e4m3
from niwaki.runtime.api import ModelError, RequestError, SamplingOptions
from niwaki.runtime.models.config import ModelConfig, parse_config, with_prefix
from niwaki.runtime.models.fields import token_ids
from niwaki.runtime.models.quantized import Scheme, stem
from niwaki.runtime.models.weights import expected_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of 100,000 tensors is below 16 MB
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of parts of weights that are stored in fewer bits.
PACKED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
TENSOR_DTYPES = FLOAT_DTYPES | PACKED_DTYPES
NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `size` bytes from `offset` on in `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder whose small files have been read. `eos_ids` of the config include generation_config.json's."""

    path: Path
    config: ModelConfig
    generation_defaults: SamplingOptions


def read_model_folder(path: Path) -> ModelFolder:
    """Read config.json and, where there is one, generation_config.json; of weights no more than their names.

    Raises:
        ModelError: in one line, with the file's name.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        is_name = not path.exists() and re.fullmatch(r"[\w-]+/[\w.-]+", str(path)) is not None
        hint = f"; nothing is downloaded: hf download {path} --local-dir FOLDER gets a model of that name" * is_name
        raise ModelError(f"model folder {path} {what}; give a folder with config.json and model.safetensors{hint}")
    config_file = path / "config.json"
    raw = read_json_object(config_file)
    generation_file = path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    with _naming(config_file):
        config = parse_config(raw)
    with _naming(generation_file):
        defaults = _generation_defaults(generation)
        # generation_config.json wins, as in transformers: chat models list their end-of-turn token only there.
        eos_ids = token_ids(generation, "eos_token_id") or config.eos_ids
    for token_id in eos_ids:
        if token_id >= config.vocab_size:
            raise ModelError(f"{path}: eos_token_id {token_id} is outside the vocabulary of {config.vocab_size}")
    return ModelFolder(path, replace(with_prefix(config, _tensor_names(path)), eos_ids=eos_ids), defaults)


def open_checkpoint(folder: ModelFolder, device: torch.device) -> Checkpoint:
    """The tensors that the config of a folder calls for. Raises as `Checkpoint`."""
    config = folder.config
    return Checkpoint(
        folder.path, expected_tensors(config), config.ignored, device=device, quantization=config.quantization
    )


class Checkpoint:
    """The tensors of a model folder, by name, checked against what the model expects; reads them one at a time."""

    def __init__(
        self,
        path: Path,
        expected: Mapping[str, tuple[int, ...]],
        ignored: tuple[str, ...] = (),
        *,
        device: torch.device | None = None,
        quantization: Scheme | None = None,
    ) -> None:
        """Read the headers. Tensors whose names begin with one of `ignored` are left alone. `device`: where they go.
        `quantization`: how weights may be stored.

        Raises:
            ModelError: a file is missing, truncated or malformed, or a tensor is missing, superfluous or misshapen.
        """
        self._tensors: dict[str, StoredTensor] = {}
        for file, names in _shards(path).items():
            found = read_safetensors_header(file)
            for name in names or ():
                if name not in found:
                    raise ModelError(f"{file} lacks the tensor {name} that the index places there")
            for name, tensor in found.items():
                if name in self._tensors:
                    raise ModelError(
                        f"tensor {name} is in both {self._tensors[name].file.name} and {file.name} of {path}"
                    )
                self._tensors[name] = tensor
        self._quantization = quantization
        self._expected = expected
        self._parts: dict[str, Mapping[str, tuple[int, ...] | None]] = {}  # of the weights that do not stand as such
        stored: dict[str, tuple[int, ...] | None] = {}
        for name, shape in expected.items():
            parts = None if quantization is None else quantization.parts(name, shape, self._tensors)
            if parts is None:
                stored[name] = shape
            else:
                self._parts[name] = parts
                stored |= {stem(name) + suffix: its for suffix, its in parts.items()}
        _compare(path, self._tensors, stored, ignored)
        for name in stored.keys() & expected.keys() - self._parts.keys():
            if self._tensors[name].dtype not in FLOAT_DTYPES.values():
                raise ModelError(f"{path}: {_unsupported_dtype(name, NAMES[self._tensors[name].dtype])}")
        self._device = device or torch.device("cpu")
        self._opened: dict[Path, safe_open] = {}  # for a GPU: opening one reads its header

    def read(self, name: str) -> torch.Tensor:
        """The tensor in memory of its own, as stored, or as its parts mean it; from the file to a GPU without a tensor
        on the host between."""
        weight = self.weight(name)
        if not isinstance(weight, Coded):
            return weight
        return weight.matrix() if weight.codes.ndim == 2 else weight.matrix().mT

    def weight(self, name: str) -> Weight:
        """The same, as codes where it is stored so (those of a stack: `Scheme.weight`)."""
        parts = self._parts.get(name)
        if parts is None:
            return self._read(name)
        assert self._quantization is not None, "it has told the parts"
        read = {suffix: self._read(stem(name) + suffix) for suffix in parts}
        try:
            return self._quantization.weight(read, self._expected[name])
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error

    def code_bytes(self) -> Mapping[str, int]:
        """By name, what those weights take at most that products on this device keep in codes."""
        kept: dict[str, int] = {}
        for name, parts in self._parts.items():
            assert self._quantization is not None, "it has told the parts"
            shape = self._expected[name]
            size = self._quantization.num_bytes(shape, parts)
            is_e4m3 = "weight" in parts and self._tensors[name].dtype == torch.float8_e4m3fn
            if size is not None and (not is_e4m3 or knows_e4m3(self._device)):
                kept[name] = size
        return kept

    def _read(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        if self._device.type == "cuda":
            if stored.file not in self._opened:
                self._opened[stored.file] = safe_open(stored.file, framework="pt", device=str(self._device))
            on_device: torch.Tensor = self._opened[stored.file].get_tensor(name)  # type: ignore[no-untyped-call]
            return on_device
        data = torch.empty(stored.size, dtype=torch.uint8)
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            if file.readinto(data.numpy().data) != stored.size:
                raise ModelError(f"{stored.file} was cut short while {name} was read")
        return data.view(stored.dtype).view(stored.shape)


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
    if dtype not in TENSOR_DTYPES:
        raise ModelError(f"{file}: {_unsupported_dtype(name, dtype)}")
    size = math.prod(shape) * TENSOR_DTYPES[dtype].itemsize
    if begin < 0 or end - begin != size:
        raise ModelError(f"{file}: {name} of {dtype} {shape} takes {size} bytes, its offsets say {begin} to {end}")
    return StoredTensor(file, TENSOR_DTYPES[dtype], tuple(shape), data_start + begin, size)


def _shards(path: Path) -> dict[Path, list[str] | None]:
    """Each weight file, with the tensors that the index places there (None: no index)."""
    single, index = path / SINGLE, path / INDEX
    if single.exists():
        return {single: None}
    if not index.exists():
        others = sorted(file.name for file in path.glob("*.bin"))
        hint = f"; {others[0]} holds pickled code, convert it to safetensors" if others else ""
        raise ModelError(f"{path} has neither {SINGLE} nor {INDEX}{hint}")
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


def _tensor_names(path: Path) -> Container[str]:
    """What the index lists, or the file has; nothing where there is neither."""
    single, index = path / SINGLE, path / INDEX
    if single.exists():
        return read_safetensors_header(single)
    weight_map = read_json_object(index).get("weight_map") if index.exists() else None
    return weight_map if isinstance(weight_map, dict) else ()


def _compare(
    path: Path,
    found: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...] | None],
    ignored: tuple[str, ...],
) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{path} lacks {_some(missing)}, which config.json calls for")
    extra = [name for name in found if name not in expected and not _is_ignorable(name, ignored)]
    if extra:
        raise ModelError(f"{path} has {_some(extra)}, which config.json does not call for")
    for name, shape in expected.items():
        if shape is not None and found[name].shape != shape:
            raise ModelError(
                f"{path}: tensor {name} has the shape {list(found[name].shape)}, config.json calls for {list(shape)}"
            )


def _unsupported_dtype(name: str, dtype: str) -> str:
    return f"{name} has the dtype {dtype}; supported: {', '.join(FLOAT_DTYPES)}"


def _is_ignorable(name: str, ignored: tuple[str, ...]) -> bool:
    """Beside `ignored`, tensors that carry nothing of their own: old checkpoints keep the rotary frequencies, which
    follow from the config, and tied ones may keep the head, which is the embedding."""
    return name.endswith((".rotary_emb.inv_freq", "lm_head.weight")) or name.startswith(ignored)


def _some(names: list[str]) -> str:
    kind = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{kind} {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _generation_defaults(raw: Mapping[str, object]) -> SamplingOptions:
    """The sampling fields that the model's makers recommend. `do_sample: false` means greedy, a top_k of 0 off."""
    greedy = raw.get("do_sample") is False
    options = SamplingOptions(
        temperature=0.0 if greedy else _float(raw, "temperature"),
        top_p=_float(raw, "top_p"),
        top_k=_top_k(raw),
        min_p=_float(raw, "min_p"),
        repetition_penalty=_float(raw, "repetition_penalty"),
    )
    try:
        options.resolve()
    except RequestError as error:
        raise ModelError(str(error)) from error
    return options


def _float(raw: Mapping[str, object], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{name} must be a number, got {value!r}")
    return float(value)


def _top_k(raw: Mapping[str, object]) -> int | None:
    value = raw.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"top_k must be a whole number, got {value!r}")
    return value or -1


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put the file's name before the message of a ModelError raised inside."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
