"""What is asked of every engine alike: waves of requests, by workload, and how long they take at the machine's limit.

A wave is requests that are there at once; the next wave begins when all of it is done. Ids are random, and so is the
text: what a wave builds on is given, not what the one before it wrote, or engines would not do equal work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from niwaki.runtime.models.config import ModelConfig
from tests.benchmarks.bench_prefix import NUM_RESERVED

Request = tuple[list[int], int]  # token ids, and how many new ones
Wave = list[Request]
Size = tuple[int, int]  # from, to

SEED = 31


class Draw:
    """Random ids and sizes."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._random = np.random.default_rng([SEED, *name.encode()])
        self._vocab_size = vocab_size

    def size(self, size: Size) -> int:
        return int(self._random.integers(size[0], size[1] + 1))

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(NUM_RESERVED, self._vocab_size, count).tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class Workload:
    shape: str
    waves: Callable[[Draw], list[Wave]]
    aim: str = ""
    branches: tuple[int, ...] = ()  # of one program, which stand side by side: in the first wave, the next, and again


def plain(draw: Draw) -> list[Wave]:
    return [[(draw.ids(draw.size((64, 256))), draw.size((64, 256))) for _ in range(32)]]


def few_shot(draw: Draw, shared: int, own: int, count: int, new: int) -> list[Wave]:
    prefix = draw.ids(shared)
    return [[(prefix + draw.ids(own), new) for _ in range(count)]]


def scored(draw: Draw) -> list[Wave]:
    """Four continuations of each question; a token is drawn behind each where a `select` would read its scores."""
    prefix = draw.ids(768)
    questions = [prefix + draw.ids(48) for _ in range(64)]
    return [[(question + draw.ids(12), 1) for question in questions for _ in range(4)]]


def turns(draw: Draw, texts: Sequence[list[int]], asked: Sequence[Size], answered: Size) -> list[Wave]:
    """Each text goes on by a turn of its own and an answer, wave after wave."""
    waves: list[Wave] = []
    for size in asked:
        waves.append([(text + draw.ids(draw.size(size)), draw.size(answered)) for text in texts])
        texts = [ids + draw.ids(count) for ids, count in waves[-1]]
    return waves


def thoughts(draw: Draw) -> list[Wave]:
    """Each problem branches in four; the branch that is kept branches again."""
    problems, waves = [draw.ids(256) for _ in range(8)], []
    for _ in range(3):
        branches = [[problem + draw.ids(8) for _ in range(4)] for problem in problems]
        waves.append([(branch, 32) for group in branches for branch in group])
        problems = [group[0] + draw.ids(32) for group in branches]
    return waves


def judged(draw: Draw) -> list[Wave]:
    """Five judges of each text, and one who merges what they said."""
    texts = [draw.ids(384) for _ in range(32)]
    judges = [(text + draw.ids(24), 32) for text in texts for _ in range(5)]
    return [judges, [(text + draw.ids(5 * 32), 32) for text in texts]]


WORKLOADS: Mapping[str, Workload] = {
    "W0": Workload("32 x (64-256 in, 64-256 out)", plain),
    "W0 alone": Workload("1 x 4 answers in turn, 256 in, 128 out", lambda draw: few_shot(draw, 0, 256, 1, 128) * 4),
    "W1": Workload("200 x (512 shared + 48), 1 out", lambda draw: few_shot(draw, 512, 48, 200, 1), ">= 2"),
    "W2": Workload("64 x 4 x (768 shared + 48 + 12), 1 out", scored, ">= 4", (4,)),
    "W3": Workload(
        "16 x 6 steps, 512 shared + 64 a step, 24 out",
        lambda draw: turns(draw, [draw.ids(512)] * 16, [(64, 64)] * 6, (24, 24)),
        ">= 2.5",
    ),
    "W5": Workload("8 x branch 4 x depth 3, 256 in, 32 out", thoughts, ">= 3", (4,)),
    "W6": Workload("1 x 8 branches, 256 shared + 8, 48 out", lambda draw: few_shot(draw, 256, 8, 8, 48), branches=(8,)),
    "W7": Workload("32 x (5 judges + 1), 384 + 24, 32 out", judged, ">= 2.5", (5, 1)),
    "W11": Workload(
        "32 x 4 turns, 64-128 in, 4-8 out", lambda draw: turns(draw, [[]] * 32, [(64, 128)] * 4, (4, 8)), ">= 2.5"
    ),
    "W11 long": Workload(
        "32 x 4 turns, 64-128 in, 64-128 out", lambda draw: turns(draw, [[]] * 32, [(64, 128)] * 4, (64, 128))
    ),
    "W12": Workload(
        "64 x 2 calls, 256 shared + 192, 32 out",
        lambda draw: turns(draw, [draw.ids(256)] * 64, [(192, 192), (8, 8)], (32, 32)),
        ">= 1.8",
    ),
    "W13": Workload("64 x 256 unique, 32 out", lambda draw: few_shot(draw, 0, 256, 64, 32)),
    "W14": Workload("32 x (512 shared + 1), 64 out", lambda draw: few_shot(draw, 512, 1, 32, 64)),
}
BRANCHING = tuple(name for name, workload in WORKLOADS.items() if workload.branches)
COUNTED = ("W1", "W2", "W3", "W5", "W6", "W7", "W11", "W12")  # of which the geometric mean is taken


def waves_of(names: Sequence[str], vocab_size: int) -> dict[str, list[Wave]]:
    """The same for the same vocabulary, whichever names are asked for."""
    return {name: WORKLOADS[name].waves(Draw(name, vocab_size)) for name in names}


def serial(name: str, waves: Sequence[Wave]) -> list[Wave]:
    """The same requests with the branches of each program in turn: what it asks for that forks nothing."""
    counts = cycle(WORKLOADS[name].branches or (1,))
    return [wave[first::count] for wave, count in zip(waves, counts, strict=False) for first in range(count)]


# -- the limit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do: bytes and bfloat16 operations a second."""

    bandwidth: float
    flops: float

    @classmethod
    def measured(cls) -> Limits:
        """With the threads that torch has: a sum over 256 MiB, and a product of 1,024 x 2,048 x 2,048."""
        data = torch.ones(1 << 26)
        a, b = torch.ones(1024, 2048, dtype=torch.bfloat16), torch.ones(2048, 2048, dtype=torch.bfloat16)
        return cls(data.nbytes / _best_of(lambda: data.sum()), 2 * 1024 * 2048 * 2048 / _best_of(lambda: a @ b))


def _best_of(run: Callable[[], object], times: int = 9) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def least_seconds(waves: Sequence[Wave], config: ModelConfig, limits: Limits) -> float:
    """What is shared is computed once and read once for all; a step takes its bytes or its products, whichever is more.

    Attention's own products are left out: below 5 % of the others at these lengths.
    """
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2  # bytes a token
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    weights = config.num_layers * layer
    known: set[bytes] = set()
    seconds = 0.0
    for wave in waves:
        packed = [np.array(ids, np.int32).tobytes() for ids, _ in wave]
        prefixes = {ids[:stop] for ids in packed for stop in range(64, len(ids) + 1, 64)}  # by pages of 16
        computed = 16 * len(prefixes - known) + sum(len(ids) % 16 for ids, _ in wave)
        known |= prefixes
        seconds += 2 * (computed * weights + len(wave) * head) / limits.flops
        for step in range(1, max(new for _, new in wave)):
            rows = sum(new > step for _, new in wave)
            read = 2 * (weights + head) + kv * (16 * len(prefixes) + rows * step)
            seconds += max(read / limits.bandwidth, 2 * rows * (weights + head) / limits.flops)
    return seconds
