"""Which tensors a checkpoint of a config has: names, shapes, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the checkpoint, by its name in the file, with its shape."""
    return {config.prefix + name: shape for name, shape in _text_tensors(config).items()}


def _text_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, kind in enumerate(config.layer_kinds):
        for name, shape in _layer(config, kind):
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[tuple[str, Shape]]:
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for norm in (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm):
        if norm is not None:
            yield f"{norm}.weight", (hidden,)
    yield from _linear(names.qkv, (q_width, kv_width, kv_width), hidden, config.attention_bias or config.qkv_bias)
    if config.qk_norm is not None:
        is_whole = config.qk_norm == "whole"
        yield "self_attn.q_norm.weight", (q_width if is_whole else config.head_dim,)
        yield "self_attn.k_norm.weight", (kv_width if is_whole else config.head_dim,)
    yield from _linear((names.attention_out,), (hidden,), q_width, config.attention_bias)
    if kind.is_sparse and config.experts is not None:
        yield from _experts(config, config.experts)
    else:
        yield from _linear(names.gate_up, (inner, inner), hidden, config.mlp_bias)
        yield from _linear((names.down,), (hidden,), inner, config.mlp_bias)


def _experts(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    names, hidden = config.names, config.hidden_size
    yield f"{names.router}.weight", (experts.count, hidden)
    for number in range(experts.count):
        gate_up = tuple(name.format(number) for name in names.expert_gate_up)
        yield from _linear(gate_up, (experts.width, experts.width), hidden, False)
        yield from _linear((names.expert_down.format(number),), (hidden,), experts.width, False)
    if experts.shared_width is not None:
        for name in ("gate_proj", "up_proj"):
            yield f"mlp.shared_expert.{name}.weight", (experts.shared_width, hidden)
        yield "mlp.shared_expert.down_proj.weight", (hidden, experts.shared_width)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _linear(
    names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, has_bias: bool
) -> Iterator[tuple[str, Shape]]:
    """One tensor for each of `outputs`, or one for all of them."""
    rows = outputs if len(names) == len(outputs) else (sum(outputs),)
    for name, count in zip(names, rows, strict=True):
        yield f"{name}.weight", (count, inputs)
        if has_bias:
            yield f"{name}.bias", (count,)
