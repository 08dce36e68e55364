"""How often text goes on as if its prompt had not been cut, with healing and without.

    python -m tests.benchmarks.bench_healing --cuts 1000

Real text (docs/) is cut at random characters. What should follow: the rest of the token that the cut went through, then
what the model greedily writes behind the uncut tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from niwaki.runtime.engine import Engine

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEFORE = 120  # characters of a prompt
BEHIND = 6  # characters compared behind the token that was cut


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of `cuts` cuts, `inside` went through a token. How many texts were as from the uncut prompt."""

    cuts: int
    inside: int
    healed: int
    plain: int


def agreement(engine: Engine, cuts: int, seed: int = 0) -> Agreement:
    draw = random.Random(seed)
    pages = [path.read_text("utf-8") for path in sorted(DOCS.glob("*.md"))]
    text = "\n".join(pages)
    tokenizer = engine.tokenizer
    wholes: list[list[int]] = []
    prompts: list[list[int]] = []
    rests: list[str] = []
    for _ in range(cuts):
        cut = draw.randrange(BEFORE, len(text) - 60)
        window = text[cut - BEFORE : cut + 40]
        ids = tokenizer.plain_ids(window)
        end, kept = 0, 0
        while end < len(window[:BEFORE].encode()):
            end += len(tokenizer.bytes_of(ids[kept]) or b"")
            kept += 1
        wholes.append([*tokenizer.bos_ids, *ids[:kept]])
        prompts.append([*tokenizer.bos_ids, *tokenizer.plain_ids(window[:BEFORE])])
        rests.append(window.encode()[len(window[:BEFORE].encode()) : end].decode("utf-8", "replace"))
    uncut = _continued(engine, wholes, heal=False)
    healed = _continued(engine, prompts, heal=True)
    plain = _continued(engine, prompts, heal=False)

    def count(texts: Sequence[str]) -> int:
        wanted = [(rest + whole)[: len(rest) + BEHIND] for rest, whole in zip(rests, uncut, strict=True)]
        return sum(text.startswith(start) for text, start in zip(texts, wanted, strict=True))

    return Agreement(cuts, sum(map(bool, rests)), count(healed), count(plain))


def _continued(engine: Engine, prompts: Sequence[Sequence[int]], *, heal: bool) -> list[str]:
    options = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True, "heal": heal}
    results = engine.generate(input_ids=prompts, sampling_params=options)
    assert isinstance(results, list)
    return [str(result["text"]) for result in results]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with Engine(kv_tokens=65_536) as engine:
        print(agreement(engine, given.cuts, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
