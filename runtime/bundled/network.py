"""The Llama network as it is trained: fused projections, bfloat16, no cache. Export gives the Hugging Face names."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int = 2048
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    inner: int = 704
    theta: float = 1e6  # slow pairs enough to compare contents over 2,000 tokens
    eps: float = 1e-5
    context: int = 4096
    noting: int = 4  # blocks before the place where notes are read, in training

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def dict(self) -> dict[str, object]:
        return asdict(self)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inside = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.norm1 = nn.Parameter(torch.ones(shape.width))
        self.norm2 = nn.Parameter(torch.ones(shape.width))
        self.qkv = nn.Parameter(torch.zeros(inside, shape.width))
        self.out = nn.Parameter(torch.zeros(shape.width, shape.width))
        self.gate_up = nn.Parameter(torch.zeros(2 * shape.inner, shape.width))
        self.down = nn.Parameter(torch.zeros(shape.width, shape.inner))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (rows, length, width) = self.shape, x.shape
        size = shape.head_dim
        h = F.rms_norm(x, (width,), self.norm1, shape.eps)
        split = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
        q, k, v = torch.split(F.linear(h, self.qkv), split, -1)
        q = rotate(q.view(rows, length, shape.heads, size), cos, sin).transpose(1, 2)
        k = rotate(k.view(rows, length, shape.kv_heads, size), cos, sin).transpose(1, 2)
        v = v.view(rows, length, shape.kv_heads, size).transpose(1, 2)
        repeat = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, width), self.out)
        gate, up = F.linear(F.rms_norm(x, (width,), self.norm2, shape.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves side by side: x [rows, length, heads, head_dim]; angles [rows, length, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Network(nn.Module):
    """ids [rows, length] and their angles -> hidden states [rows, length, width]; times `embed` they are logits.

    A second result of the same shape is read in the middle and is for training alone (`Span.note`); times `embed` it
    tells which token a place has in mind. Deep supervision: Lee et al. 2015, https://arxiv.org/abs/1409.5185 .
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.zeros(shape.vocabulary, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.noting = nn.Parameter(torch.zeros(shape.width, shape.width))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, length, 1, head_dim], made in float32 as transformers does."""
        steps = torch.arange(0, self.shape.head_dim, 2, device=positions.device)
        rates = self.shape.theta ** (-steps.float() / self.shape.head_dim)
        angle = positions.float()[:, :, None] * rates
        angle = torch.cat((angle, angle), -1)[:, :, None]
        return angle.cos().to(self.embed.dtype), angle.sin().to(self.embed.dtype)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = middle = F.embedding(ids, self.embed)
        for index, block in enumerate(self.blocks, 1):
            x = block(x, cos, sin)
            middle = x if index == self.shape.noting else middle
        noted = F.linear(F.rms_norm(middle, (self.shape.width,), None, self.shape.eps), self.noting)
        return F.rms_norm(x, (self.shape.width,), self.norm, self.shape.eps), noted


def hf_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def hf_tensors(masters: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The float32 masters under Hugging Face names, rounded to bfloat16."""
    size = shape.head_dim
    made = {"model.embed_tokens.weight": masters["embed"], "model.norm.weight": masters["norm"]}
    for index in range(shape.layers):
        inside = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
        q, k, v = torch.split(masters[f"blocks.{index}.qkv"], inside)
        gate, up = masters[f"blocks.{index}.gate_up"].chunk(2)
        name = f"model.layers.{index}"
        made |= {
            f"{name}.self_attn.q_proj.weight": q,
            f"{name}.self_attn.k_proj.weight": k,
            f"{name}.self_attn.v_proj.weight": v,
            f"{name}.self_attn.o_proj.weight": masters[f"blocks.{index}.out"],
            f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up,
            f"{name}.mlp.down_proj.weight": masters[f"blocks.{index}.down"],
            f"{name}.input_layernorm.weight": masters[f"blocks.{index}.norm1"],
            f"{name}.post_attention_layernorm.weight": masters[f"blocks.{index}.norm2"],
        }
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in made.items()}


def masters_of(tensors: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The inverse of `hf_tensors`: float32 masters by parameter name, from tensors under Hugging Face names."""
    made = {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for index in range(shape.layers):
        name = f"model.layers.{index}"
        parts = {
            "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "out": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
            "norm1": ["input_layernorm"],
            "norm2": ["post_attention_layernorm"],
        }
        for part, sources in parts.items():
            made[f"blocks.{index}.{part}"] = torch.cat([tensors[f"{name}.{source}.weight"] for source in sources])
    return {name: tensor.float() for name, tensor in made.items()}
