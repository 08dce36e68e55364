"""What a model is: the fields of config.json that decide its shapes and its arithmetic, checked one by one.

Knows no tensors and no files: `parse_config` takes the decoded JSON. All families end in one `ModelConfig`, whose
defaults are Llama's: a family (`Family`) fills in what it does differently, and the decoder reads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.rope import LongRopeScaling, RopeScaling
from niwaki.runtime.api import ModelError
from niwaki.runtime.models import ARCHITECTURES, family_of
from niwaki.runtime.models.fields import Fields, flag, number, text, token_ids, whole
from niwaki.runtime.models.positions import Rope, read_ropes
from niwaki.runtime.models.quantized import Scheme, read_scheme

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}

# float16 has no CPU kernels; every float16 number is a float32 number.
STORED_DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}

Activation = Literal["silu", "gelu_tanh", "clamped"]
TRUNK = "model."  # what the names of all tensors of a text model begin with but that of its head
EMBEDDING = f"{TRUNK}embed_tokens.weight"
FINAL_NORM = f"{TRUNK}norm.weight"
HEAD = "lm_head.weight"
# Tensors of what a text model sees with.
SEEING = ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.")
VISION = (*SEEING, *(TRUNK + name for name in SEEING))
# What the names of a text model that also sees may begin with, see `stored_name`: published folders have other names
# than transformers has in memory, and writes where it is told not to translate them back.
PREFIXES = ("", "language_model.", "model.language_model.")

JOINED_GATE_UP, JOINED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer may do unlike the others of its model."""

    window: int | None = None  # keys that a query sees, its own included; None: all
    chunk: int | None = None  # keys: no query sees across a multiple of it
    rope: Literal["main", "local", "none"] = "main"
    has_qk_norm: bool = True  # where the model has one
    is_sparse: bool = False  # experts instead of one MLP


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a checkpoint calls the parts of a layer. None: the model has no such part. One name instead of several: one
    tensor holds the rows of all. `{}`: the expert's number."""

    attention_norm: str | None = "input_layernorm"  # of what attention reads
    attention_post_norm: str | None = None  # of what attention adds
    mlp_norm: str | None = "post_attention_layernorm"  # of what the MLP reads
    mlp_post_norm: str | None = None  # of what the MLP adds
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of MLPs: the router scores `count` for each token, picks `per_token` and weighs what they add."""

    count: int
    per_token: int
    width: int
    renormalise: bool  # the weights of the chosen sum to 1
    shared_width: int | None = None  # of one more MLP that all tokens take
    is_shared_gated: bool = True  # by a sigmoid
    score: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0  # of the weights
    groups: int = 1  # experts stand in so many, of which a token's come from the best
    groups_per_token: int = 1
    group_best: int = 1  # experts whose scores, summed, are the group's
    has_correction: bool = False  # a number for each expert is added to its score where experts are chosen
    is_correction_a_row: bool = False  # it is stored as [1, experts]
    weighs_input: bool = False  # the weight is of what an expert reads, not of what it adds
    has_router_bias: bool = False
    has_bias: bool = False
    # How a checkpoint has them: a tensor each; one of all, [experts, inputs, outputs]; in it gates and ups in turn; or
    # one of all, [experts, outputs, inputs].
    storage: Literal["each", "stacked", "interleaved", "joined"] = "each"

    def __post_init__(self) -> None:
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise ModelError(f"{self.count} experts in {self.groups} groups, {self.groups_per_token} a token: no way")
        in_groups = self.count // self.groups * self.groups_per_token
        if not self.per_token <= in_groups:
            raise ModelError(f"{self.per_token} experts a token cannot be chosen from {in_groups}")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are products of one latent vector a token, which is
    what the cache keeps, beside `rotary_dim` channels of key that all heads share."""

    query_rank: int | None  # of the queries' own latent vector; None: they have none
    rank: int
    head_dim: int  # of a key without its rotated channels
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale x ln(1 + floor((p + offset) / floor))."""

    scale: float
    floor: float
    offset: float = 1.0
    is_everywhere: bool = False  # else in layers without rope alone


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
    eos_ids: tuple[int, ...] = ()
    # What families vary
    activation: Activation = "silu"
    gate_alpha: float = 1.0  # of the clamped gate, as is the next
    gate_limit: float = 0.0
    local_rope: Rope | None = None
    is_rope_interleaved: bool = False  # in the checkpoint: channels 2i and 2i + 1 turn together
    rotary_dim: int | None = None  # channels of a head that are turned, the first ones; None: all
    qkv_bias: bool = False  # where only queries, keys and values have one
    # Queries and keys normalised, each head by itself or all together; "bare": each head, without weights.
    qk_norm: Literal["head", "whole", "bare"] | None = None
    norm_offset: float = 0.0  # added to the weights of all norms
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each block adds
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores become cap x tanh(score / cap)
    has_sinks: bool = False
    temperature: Temperature | None = None
    latent: Latent | None = None  # head_dim is then rank + rotary_dim, and there is one kv head
    logit_scale: float = 1.0
    logit_cap: float | None = None
    experts: Experts | None = None
    layers: tuple[LayerKind, ...] = ()  # empty: all of the plain kind
    names: LayerNames = field(default_factory=LayerNames)
    prefix: str = ""  # see `stored_name`
    quantization: Scheme | None = None  # how the checkpoint stores weights
    ignored: tuple[str, ...] = ()  # what the names of tensors begin with that are no part of the text model

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ModelError(f"{one.name} must be a whole number of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be shared by {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.layers and len(self.layers) != self.num_layers:
            raise ModelError(f"{self.num_layers} layers, but kinds for {len(self.layers)}")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.layers or (LayerKind(),) * self.num_layers

    @property
    def kv_halves(self) -> int:
        """Vectors that the cache keeps of a kv head and token: key and value, or one that is both."""
        return 2 if self.latent is None else 1

    def kv_bytes_per_token(self, dtype: str = "auto", kv_dtype: str = "auto") -> int:
        """Bytes of keys and values of one token in all layers. kv_dtype: "int8", "fp8", or "auto" for the model's."""
        item = DTYPE_BYTES[self.dtype if dtype == "auto" else dtype]
        of_head = self.head_dim * item if kv_dtype == "auto" else self.head_dim + SCALE_BYTES
        return self.kv_halves * self.num_layers * self.num_kv_heads * of_head


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


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, by what sets it apart from Llama."""

    # config.json and the config that Llama would make of it -> the family's own. May raise ModelError.
    read: Callable[[Fields, ModelConfig], ModelConfig]
    # What config.json means where it is silent; Llama's defaults apply to the rest.
    defaults: Mapping[str, object] = field(default_factory=dict)
    may_turn_part: bool = False  # partial_rotary_factor may be below 1
    head_dim: str = "head_dim"  # the field that says how many channels of a head are turned
    # What older files say otherwise, as newer ones say it.
    translate: Callable[[Fields], Fields] = lambda raw: raw
    # The text model of one that also sees: its fields stand in `text_config`, of these model types.
    text_types: tuple[str, ...] = ()
    text_prefix: str = "language_model."  # of its tensors, as published
    # By type of the text model: what its fields mean where they are silent, before `defaults`.
    text_defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def parse_config(raw: Fields, stored: str = "float32") -> ModelConfig:
    """The config of a Hugging Face folder. `stored`: the dtype of its tensors, for where config.json is silent.

    Raises:
        ModelError: naming the field, its value and what is supported. Without the folder's name; the loader adds it.
    """
    architecture = _architecture(raw)
    family = family_of(architecture)
    raw = family.translate(raw)
    if family.text_types:
        found = _text_config(raw, family.text_types)
        own = family.text_defaults.get(text(found, "model_type", family.text_types[0]), {})
        raw = {**own, **raw, **found}
    raw = {**family.defaults, **raw}
    hidden_size = whole(raw, "hidden_size")
    num_heads = whole(raw, "num_attention_heads")
    context_length = whole(raw, "max_position_embeddings", 2048)
    if raw.get(family.head_dim) is None and hidden_size % num_heads:
        raise ModelError(
            f"hidden_size {hidden_size} is no multiple of {num_heads} attention heads and there is no head_dim"
        )
    head_dim = whole(raw, family.head_dim, hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary positions, got {head_dim}")
    ropes = read_ropes(raw, context_length, head_dim)
    if ropes.rotary_dim != head_dim and not family.may_turn_part:
        raise ModelError(f"partial_rotary_factor must be 1 for {architecture}, got {ropes.rotary_dim / head_dim}")
    if isinstance(ropes.main.scaling, LongRopeScaling):  # see there: beyond it, cached keys would have to change
        context_length = min(context_length, ropes.main.scaling.original_context)
    stored = text(raw, "dtype", text(raw, "torch_dtype", stored)).removeprefix("torch.")
    if stored not in STORED_DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(STORED_DTYPES)}, got {stored!r}")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=whole(raw, "vocab_size"),
        num_layers=whole(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=whole(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=whole(raw, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_length=context_length,
        rope_theta=ropes.main.theta,
        rope_scaling=ropes.main.scaling,
        local_rope=ropes.local,
        rotary_dim=None if ropes.rotary_dim == head_dim else ropes.rotary_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=flag(raw, "tie_word_embeddings"),
        attention_bias=flag(raw, "attention_bias"),
        mlp_bias=flag(raw, "mlp_bias"),
        dtype=STORED_DTYPES[stored],
        eos_ids=token_ids(raw, "eos_token_id"),
        activation=_activation(raw),
        quantization=read_scheme(raw),
    )
    if family.text_types:
        config = replace(config, prefix=family.text_prefix, ignored=VISION)
    return family.read(raw, config)


def stored_name(prefix: str, name: str) -> str:
    """What a file calls a tensor of the text model. A prefix that names the trunk takes its place and leaves the head
    alone; any other stands before all names."""
    if not prefix.startswith(TRUNK):
        return prefix + name
    return prefix + name.removeprefix(TRUNK) if name.startswith(TRUNK) else name


def with_prefix(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """The config with the prefix that the files have, whose tensors have these names; as it is where they have none."""
    prefixes = (config.prefix, *PREFIXES)
    found = (prefix for prefix in prefixes if stored_name(prefix, FINAL_NORM) in names)
    return replace(config, prefix=next(found, config.prefix))


def with_joined_experts(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The config with experts as transformers 5 has them in memory, and writes them where it is told not to translate
    them back: one tensor of all. As it is where the files, whose tensors have these shapes, have them in no such."""
    sparse = next((index for index, kind in enumerate(config.layer_kinds) if kind.is_sparse), None)
    experts = config.experts
    if sparse is None or experts is None:
        return config
    shape = shapes.get(stored_name(config.prefix, f"{TRUNK}layers.{sparse}.{JOINED_GATE_UP}"))
    sides = 2 * experts.width, config.hidden_size
    is_turned = experts.storage == "stacked" and sides != sides[::-1] and shape == (experts.count, *sides)
    if shape is None or not (experts.storage == "each" or is_turned):
        return config
    correction = config.names.correction.replace("block_sparse_moe.", "mlp.").replace("mlp.moe_", "mlp.gate.moe_")
    names = replace(
        config.names,
        router="mlp.gate",
        correction=correction,
        expert_gate_up=(JOINED_GATE_UP,),
        expert_down=JOINED_DOWN,
    )
    return replace(config, names=names, experts=replace(experts, storage="joined"))


def with_windows(config: ModelConfig, windows: tuple[int | None, ...]) -> ModelConfig:
    """The config with a window, or none, for each layer."""
    kinds = zip(config.layer_kinds, windows, strict=True)
    return replace(config, layers=tuple(replace(kind, window=window) for kind, window in kinds))


def _architecture(raw: Fields) -> str:
    named = raw.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    shown = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    raise ModelError(f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _text_config(raw: Fields, text_types: tuple[str, ...]) -> Fields:
    found = raw.get("text_config")
    if not isinstance(found, dict):
        raise ModelError(f"text_config must be an object, got {found!r}")
    if (model_type := text(found, "model_type", text_types[0])) not in text_types:
        raise ModelError(f"text_config: model_type {model_type!r} is not supported; supported: {', '.join(text_types)}")
    # Where both say it, the outer one counts: it is of the whole model, whose head this is.
    return {**found, **{name: raw[name] for name in ("tie_word_embeddings",) if name in raw}}


def _activation(raw: Fields) -> Activation:
    """`hidden_activation` is Gemma's name of it; its `hidden_act` is then a leftover."""
    name = "hidden_act" if raw.get("hidden_activation") is None else "hidden_activation"
    found = text(raw, name, "silu")
    if found not in ACTIVATIONS:
        raise ModelError(f"{name} {found!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]
