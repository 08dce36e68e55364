"""First weights: noise, with the two halves of a copying head planted in the first two layers.

A transformer learns to copy by growing a head that looks one token back and, a layer later, a head that looks for where
the current token was seen and takes what followed (Olsson et al. 2022, "In-context learning and induction heads"). All
our tasks wait for that, and it took the first millions of tokens; both heads can be written down, so they are:

- Embeddings share a constant direction and leave the last `head_dim` dimensions free.
- Layer 0, group 0: queries and keys see only the constant, turned so that rotary scores peak one token back; values are
  a random code of the token, written to the free dimensions.
- Layer 1: keys are the code of the token before, queries the code of the token itself, both in the slow rotary pairs,
  where distance hardly turns them; each group compares half of the code and copies its share of the embedding.

Everything else is learnt, these weights too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from niwaki.runtime.bundled.network import Network, Shape

EMBED_STD = 0.04
CONSTANT = 0.5  # length of the constant direction against the rest of an embedding
LOOK_BACK = 1.2  # weight of the look one token back
MATCH, COPY = 1.6, 0.5


def masters(network: Network, seed: int) -> dict[str, Tensor]:
    """The float32 weights by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        value = torch.ones(parameter.shape)
        if name == "noting":
            value = torch.eye(network.shape.width)
        elif name == "embed":
            value.normal_(0, EMBED_STD, generator=generator)
        elif name.endswith(("out", "down")):
            value.zero_()  # blocks begin as nothing: the embedding reaches every layer
        elif value.dim() == 2:
            value.normal_(0, 0.5 * value.shape[1] ** -0.5, generator=generator)
        made[name] = value
    plant_copying(made, network.shape, generator)
    return {name: value.to(network.embed.device) for name, value in made.items()}


def plant_copying(made: dict[str, Tensor], shape: Shape, generator: torch.Generator) -> None:
    size, half, width = shape.head_dim, shape.head_dim // 2, shape.width
    used = width - size  # dimensions of the embedding; the last `size` are for the code of the token before
    queries, group = shape.heads * size, shape.heads // shape.kv_heads
    embed = made["embed"]
    embed[:, used:] = 0
    constant = torch.zeros(width)
    constant[:used] = used**-0.5
    embed -= torch.outer(embed @ constant, constant)
    embed += CONSTANT * EMBED_STD * used**0.5 * constant

    code = torch.randn(size, used, generator=generator) / used**0.5  # [size, used]: a token's code
    code = torch.nn.functional.pad(code, (0, size))
    code -= torch.outer(code @ constant, constant)

    first = made["blocks.0.qkv"]
    speeds = shape.theta ** (-torch.arange(half) / half)
    query, key = torch.cat((speeds.cos(), -speeds.sin())), torch.cat((torch.ones(half), torch.zeros(half)))
    first[:size] = LOOK_BACK * torch.outer(query, constant)
    first[queries : queries + size] = LOOK_BACK * torch.outer(key, constant)
    values = queries + shape.kv_heads * size
    first[values : values + size] = code
    made["blocks.0.out"][used:, :size] = 0.1 * torch.eye(size)

    second = made["blocks.1.qkv"]
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, size)))  # [half] the slow pairs
    for index in range(shape.kv_heads):
        part = code[index * half : (index + 1) * half]  # [half, width]
        head = index * group * size
        keys = queries + index * size
        second[head : head + size] = 0
        second[head + slow] = MATCH * part
        second[keys : keys + size] = 0
        second[keys + slow, used + index * half + torch.arange(half)] = MATCH
        values = queries + (shape.kv_heads + index) * size
        second[values : values + size] = 0
        copied = torch.arange(index * size, (index + 1) * size)
        second[values + torch.arange(size), copied] = 1
        made["blocks.1.out"][copied, head + torch.arange(size)] = COPY
