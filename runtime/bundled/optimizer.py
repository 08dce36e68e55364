"""Muon on the matrices, Adam on the rest, over float32 masters; the network itself holds bfloat16 copies.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ . Matrices of one shape step together as one
batch, which is what makes it cheap on a CPU. Several workers may share the state: each steps the names it owns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from niwaki.runtime.bundled.initial import masters
from niwaki.runtime.bundled.network import Network

MOMENTUM, WEIGHT_DECAY = 0.95, 0.02
ADAM_FIRST, ADAM_SECOND = 0.9, 0.95


def orthogonal(x: Tensor) -> Tensor:
    """Five steps of Newton-Schulz: [count, rows, columns] with singular values pulled towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.float()


PARTS = ("masters", "first", "second")  # weights in float32, and their two moments


class Optimizer:
    """Owns the masters and their moments; fresh ones are drawn from `seed`. `shared`: memory that forks see too."""

    def __init__(self, network: Network, seed: int, shared: bool) -> None:
        shape = network.shape
        self.count = 0
        self.masters = masters(network, seed)
        size = shape.head_dim
        parts = {
            "qkv": [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size],
            "gate_up": [shape.inner] * 2,
        }
        self.parts = {
            name: parts.get(name.split(".")[-1], [master.shape[0]])
            for name, master in self.masters.items()
            if master.dim() == 2 and name != "embed"
        }
        self.first = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.masters.items() if name not in self.parts}
        if shared:
            for tensors in (self.masters, self.first, self.second):
                for tensor in tensors.values():
                    tensor.share_memory_()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, network: Network, gradients: dict[str, Tensor], matrix_rate: float, other_rate: float) -> None:
        """Update the masters that `gradients` names, and the network's copies of them."""
        self.count += 1
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for name, gradient in gradients.items():
            if name not in self.parts:
                self._adam(name, gradient, other_rate)
                continue
            self.first[name].lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp_(self.first[name], MOMENTUM)
            cut = self.parts[name]
            for view, part in zip(torch.split(self.masters[name], cut), torch.split(update, cut), strict=True):
                wide = part if part.shape[0] <= part.shape[1] else part.mT
                groups.setdefault((wide.shape[0], wide.shape[1]), []).append((view, wide))
        for members in groups.values():
            for (view, _), update in zip(members, orthogonal(torch.stack([wide for _, wide in members])), strict=True):
                rows, columns = view.shape
                view.mul_(1 - matrix_rate * WEIGHT_DECAY)
                view.add_(
                    update if rows <= columns else update.mT, alpha=-matrix_rate * max(1.0, rows / columns) ** 0.5
                )
        self.publish(network, gradients)

    @torch.no_grad()
    def publish(self, network: Network, names: Iterable[str]) -> None:
        parameters = dict(network.named_parameters())
        for name in names:
            parameters[name].copy_(self.masters[name])

    def _adam(self, name: str, gradient: Tensor, rate: float) -> None:
        first, second = self.first[name], self.second[name]
        first.lerp_(gradient, 1 - ADAM_FIRST)
        second.lerp_(gradient.square(), 1 - ADAM_SECOND)
        scale = (1 - ADAM_SECOND**self.count) ** 0.5 / (1 - ADAM_FIRST**self.count)
        self.masters[name].addcdiv_(first, second.sqrt().add_(1e-10), value=-rate * scale)

    @torch.no_grad()
    def begin(self, weights: dict[str, torch.Tensor]) -> None:
        """Begin with these masters, in place (others may share the memory); what an export lacks begins as noise."""
        for name, weight in weights.items():
            self.masters[name].copy_(weight)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a run goes on from, by flat names: `masters/embed`, `first/embed`, ..., `count`."""
        kept = {f"{part}/{key}": value for part in PARTS for key, value in getattr(self, part).items()}
        return {**kept, "count": torch.tensor(self.count)}

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from `state()`, in place: others may share the memory."""
        for part in PARTS:
            for key, value in getattr(self, part).items():
                value.copy_(state[f"{part}/{key}"])
        self.count = int(state["count"])
