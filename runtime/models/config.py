"""What a model is: the fields of config.json that decide its shapes and its arithmetic, checked one by one.

Knows no tensors and no files: `parse_config` takes the decoded JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from niwaki.kernels.rope import LinearScaling, Llama3Scaling, RopeScaling
from niwaki.runtime.api import ModelError
from niwaki.runtime.models import ARCHITECTURES

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}

# float16 has no CPU kernels; every float16 number is a float32 number.
STORED_DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Sizes in elements, `context_length` in tokens."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    architecture: str = "LlamaForCausalLM"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: Dtype = "float32"  # the checkpoint's own
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ModelError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be shared by {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    def kv_bytes_per_token(self, dtype: str = "auto") -> int:
        """Bytes of keys and values of one token in all layers."""
        item = DTYPE_BYTES[self.dtype if dtype == "auto" else dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item


SIZES = {
    "vocab_size",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
}


def parse_config(raw: Mapping[str, object]) -> ModelConfig:
    """The config of a Hugging Face folder.

    Raises:
        ModelError: naming the field, its value and what is supported. Without the folder's name; the loader adds it.
    """
    hidden_size = _whole(raw, "hidden_size")
    num_heads = _whole(raw, "num_attention_heads")
    context_length = _whole(raw, "max_position_embeddings", 2048)
    if _text(raw, "hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act must be 'silu', got {raw['hidden_act']!r}")
    if raw.get("quantization_config") is not None:
        raise ModelError("quantized weights are not supported; use the unquantized checkpoint")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"hidden_size {hidden_size} is no multiple of {num_heads} attention heads and there is no head_dim"
        )
    theta, scaling = _rope(raw, context_length)
    stored = _text(raw, "dtype", _text(raw, "torch_dtype", "float32")).removeprefix("torch.")
    if stored not in STORED_DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(STORED_DTYPES)}, got {stored!r}")
    return ModelConfig(
        architecture=_architecture(raw),
        vocab_size=_whole(raw, "vocab_size"),
        num_layers=_whole(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_whole(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_whole(raw, "num_key_value_heads", num_heads),
        head_dim=_whole(raw, "head_dim", hidden_size // num_heads),
        context_length=context_length,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        attention_bias=_flag(raw, "attention_bias"),
        mlp_bias=_flag(raw, "mlp_bias"),
        dtype=STORED_DTYPES[stored],
        bos_id=next(iter(token_ids(raw, "bos_token_id")), None),
        eos_ids=token_ids(raw, "eos_token_id"),
    )


def token_ids(raw: Mapping[str, object], name: str) -> tuple[int, ...]:
    """A field that holds one token id, a list of them, or nothing."""
    value = raw.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _architecture(raw: Mapping[str, object]) -> str:
    named = raw.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    shown = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    raise ModelError(f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _rope(raw: Mapping[str, object], context_length: int) -> tuple[float, RopeScaling]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    found = raw.get(name)
    if found is None:
        return _number(raw, "rope_theta", 10_000.0), None
    if not isinstance(found, dict):
        raise ModelError(f"{name} must be an object, got {found!r}")
    theta = _number(found, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if _number(found, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{name}: partial_rotary_factor must be 1, got {found['partial_rotary_factor']!r}")
    match _text(found, "rope_type", _text(found, "type", "default")):
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(_number(found, "factor"))
        case "llama3":
            low, high = _number(found, "low_freq_factor"), _number(found, "high_freq_factor")
            if high <= low:
                raise ModelError(f"{name}: high_freq_factor {high} must be above low_freq_factor {low}")
            original = _whole(found, "original_max_position_embeddings", context_length)
            return theta, Llama3Scaling(_number(found, "factor"), low, high, original)
        case other:
            raise ModelError(f"{name}: rope type {other!r} is not supported; supported: default, linear, llama3")


def _whole(raw: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _number(raw: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _flag(raw: Mapping[str, object], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"{name} must be true or false, got {value!r}")
    return value


def _text(raw: Mapping[str, object], name: str, default: str) -> str:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ModelError(f"{name} must be a string, got {value!r}")
    return value
