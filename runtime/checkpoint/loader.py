"""Opens a Hugging Face model folder: its config, its generation defaults, and its safetensors files, all checked.

Reads data only: no code comes from the folder. Knows nothing of how a model computes.
"""

from __future__ import annotations

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
from niwaki.runtime.checkpoint.folder import check_is_folder
from niwaki.runtime.checkpoint.stored import (
    FLOAT_DTYPES,
    StoredTensor,
    are_same,
    float_dtype,
    has_weights,
    read_json_object,
    stored_tensors,
    unsupported_dtype,
)
from niwaki.runtime.models.config import (
    EMBEDDING,
    HEAD,
    PREFIXES,
    ModelConfig,
    parse_config,
    stored_name,
    with_joined_experts,
    with_prefix,
)
from niwaki.runtime.models.fields import token_ids
from niwaki.runtime.models.quantized import Scheme, stem
from niwaki.runtime.models.weights import expected_tensors

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder whose small files have been read. `eos_ids` of the config include generation_config.json's."""

    path: Path
    config: ModelConfig
    generation_defaults: SamplingOptions


def read_model_folder(path: Path) -> ModelFolder:
    """Read config.json and, where there is one, generation_config.json; and of weights, where there are some, what they
    are called, and what config.json does not say of them or says wrongly.

    Raises:
        ModelError: in one line, with the file's name.
    """
    check_is_folder(path)
    config_file = path / "config.json"
    raw = read_json_object(config_file)
    tensors = stored_tensors(path) if has_weights(path) else {}
    generation_file = path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    with _naming(config_file):
        config = _as_stored(parse_config(raw, float_dtype(tensors) or "float32"), tensors)
    with _naming(generation_file):
        defaults = _generation_defaults(generation)
        # generation_config.json wins, as in transformers: chat models list their end-of-turn token only there.
        eos_ids = token_ids(generation, "eos_token_id") or config.eos_ids
    for token_id in eos_ids:
        if token_id >= config.vocab_size:
            raise ModelError(f"{path}: eos_token_id {token_id} is outside the vocabulary of {config.vocab_size}")
    return ModelFolder(path, replace(config, eos_ids=eos_ids), defaults)


def _as_stored(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    """The config with what the files know better: how they begin their names, and whether the head is the embedding.
    (One that is stored beside it and is another is not, as in transformers from 5.0 on.)"""
    config = with_joined_experts(with_prefix(config, tensors), {name: its.shape for name, its in tensors.items()})
    embedding, head = (tensors.get(stored_name(config.prefix, name)) for name in (EMBEDDING, HEAD))
    if not config.tie_embeddings or embedding is None or head is None or are_same(embedding, head):
        return config
    return replace(config, tie_embeddings=False)


def with_tied(tensors: dict[str, StoredTensor], expected: Container[str]) -> dict[str, StoredTensor]:
    """Where the embedding is the head, a file may have it under the name of the head alone."""
    for prefix in PREFIXES:
        embedding, head = (stored_name(prefix, name) for name in (EMBEDDING, HEAD))
        if embedding in expected and embedding not in tensors and head in tensors and head not in expected:
            return tensors | {embedding: tensors[head]}
    return tensors


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
        self._tensors = with_tied(stored_tensors(path), expected)
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
            if self._tensors[name].dtype not in FLOAT_DTYPES:
                raise ModelError(f"{path}: {unsupported_dtype(name, self._tensors[name].dtype)}")
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
            is_e4m3 = "weight" in parts and self._tensors[name].dtype == "F8_E4M3"
            if size is not None and (not is_e4m3 or knows_e4m3(self._device)):
                kept[name] = size
        return kept

    def _read(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        if self._device.type == "cuda":
            if stored.file not in self._opened:
                self._opened[stored.file] = safe_open(stored.file, framework="pt", device=str(self._device))
            on_device: torch.Tensor = self._opened[stored.file].get_tensor(stored.name)  # type: ignore[no-untyped-call]
            return on_device
        data = torch.empty(stored.size, dtype=torch.uint8)
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            if file.readinto(data.numpy().data) != stored.size:
                raise ModelError(f"{stored.file} was cut short while {name} was read")
        return data.view(DTYPES[stored.dtype]).view(stored.shape)


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
