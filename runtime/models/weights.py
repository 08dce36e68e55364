"""Which tensors a checkpoint of a config has: names, shapes, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from niwaki.runtime.models.config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Experts,
    Latent,
    LayerKind,
    ModelConfig,
    stored_name,
)

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the checkpoint, by its name in the file, with its shape."""
    return {stored_name(config.prefix, name): shape for name, shape in _text_tensors(config).items()}


def _text_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden)}
    for index, kind in enumerate(config.layer_kinds):
        for name, shape in _layer(config, kind):
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[tuple[str, Shape]]:
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    for norm in (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm):
        if norm is not None:
            yield f"{norm}.weight", (hidden,)
    if config.latent is not None:
        yield from _latent(config, config.latent)
    else:
        yield from _heads(config, kind)
    if kind.is_sparse and config.experts is not None:
        yield from _experts(config, config.experts)
    else:
        yield from _linear(names.gate_up, (inner, inner), hidden, config.mlp_bias)
        yield from _linear((names.down,), (hidden,), inner, config.mlp_bias)


def _heads(config: ModelConfig, kind: LayerKind) -> Iterator[tuple[str, Shape]]:
    names, hidden, head_dim = config.names, config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield from _linear(names.qkv, (q_width, kv_width, kv_width), hidden, config.attention_bias or config.qkv_bias)
    if kind.has_qk_norm and config.qk_norm in ("head", "whole"):
        is_whole = config.qk_norm == "whole"
        yield "self_attn.q_norm.weight", (q_width if is_whole else head_dim,)
        yield "self_attn.k_norm.weight", (kv_width if is_whole else head_dim,)
    if config.has_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    yield from _linear((names.attention_out,), (hidden,), q_width, config.attention_bias)


def _latent(config: ModelConfig, shape: Latent) -> Iterator[tuple[str, Shape]]:
    heads, hidden, bias = config.num_heads, config.hidden_size, config.attention_bias
    q_width = heads * (shape.head_dim + shape.rotary_dim)
    if shape.query_rank is None:
        yield "self_attn.q_proj.weight", (q_width, hidden)
    else:
        yield from _linear(("self_attn.q_a_proj",), (shape.query_rank,), hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (shape.query_rank,)
        yield "self_attn.q_b_proj.weight", (q_width, shape.query_rank)
    yield from _linear(("self_attn.kv_a_proj_with_mqa",), (shape.rank + shape.rotary_dim,), hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (shape.rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (shape.head_dim + shape.value_dim), shape.rank)
    yield from _linear((config.names.attention_out,), (hidden,), heads * shape.value_dim, bias)


def _experts(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    names, hidden, width = config.names, config.hidden_size, experts.width
    yield from _linear((names.router,), (experts.count,), hidden, experts.has_router_bias)
    if experts.has_correction:
        yield names.correction, (1, experts.count) if experts.is_correction_a_row else (experts.count,)
    if experts.storage == "each":
        for number in range(experts.count):
            gate_up = tuple(name.format(number) for name in names.expert_gate_up)
            yield from _linear(gate_up, (width, width), hidden, False)
            yield from _linear((names.expert_down.format(number),), (hidden,), width, False)
    else:
        for name, inputs, outputs in ((names.expert_gate_up[0], hidden, 2 * width), (names.expert_down, width, hidden)):
            sides = (outputs, inputs) if experts.storage == "joined" else (inputs, outputs)
            yield name, (experts.count, *sides)
            if experts.has_bias:
                yield f"{name}_bias", (experts.count, outputs)
    if experts.shared_width is not None:
        shared = experts.shared_width
        for name in ("gate_proj", "up_proj"):
            yield f"{names.shared}.{name}.weight", (shared, hidden)
        yield f"{names.shared}.down_proj.weight", (hidden, shared)
        if experts.is_shared_gated:
            yield f"{names.shared}_gate.weight", (1, hidden)


def _linear(
    names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, has_bias: bool
) -> Iterator[tuple[str, Shape]]:
    """One tensor for each of `outputs`, or one for all of them."""
    rows = outputs if len(names) == len(outputs) else (sum(outputs),)
    for name, count in zip(names, rows, strict=True):
        yield f"{name}.weight", (count, inputs)
        if has_bias:
            yield f"{name}.bias", (count,)
