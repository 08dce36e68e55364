"""How far the logits of every family are from transformers', on small models of random weights in float32.

`python -m tests.benchmarks.bench_logits` prints, for each architecture, the largest difference of any logit: of a
prompt as a whole; in random chunks, over pages in no order; and in ragged batches of several prompts, one of them
behind a cached prefix that ends within a page. The models are those of tests/families.py; of several with one
architecture the largest difference counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from niwaki.kernels.ops import Ops
from niwaki.radix.pages import PageCopy
from niwaki.runtime.forward.runner import Row, Runner
from tests.families import MODELS, VOCAB, make_pair
from tests.reference import Ids, Pair, Sequenced, difference, run

PAGE_SIZE = 4
PAGES = 80
SHARED = 21  # tokens: five whole pages and one of the sixth


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of tests/families.py; none: all")
    chosen = parser.parse_args(arguments)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name in chosen.names or MODELS:
        with TemporaryDirectory() as folder:
            found.setdefault(MODELS[name][0], []).append(differences(make_pair(name, Path(folder))))
    print("| architecture | whole | in chunks | ragged, behind a cached prefix |\n|---|---|---|---|")
    for architecture, each in found.items():
        print(f"| `{architecture}` | {' | '.join(f'{max(of_way):.1e}' for of_way in zip(*each, strict=True))} |")
    return 0


def differences(pair: Pair, device: str = "cpu", ops: Ops | None = None) -> tuple[float, float, float]:
    """On this device, by these kernels instead of its own where they are given."""
    rng = np.random.default_rng(1)
    runner = Runner.load(pair.folder, device=device, ops=ops, num_pages=PAGES, page_size=PAGE_SIZE)
    ids = random_ids(rng, 75)
    expected = pair.logits(ids)
    whole = float((runner.forward([Row(ids, 0, range(30), len(ids))]).cpu() - expected).abs().max())
    chunked = Sequenced(ids, [int(page) for page in rng.permutation(PAGES)[:19]])
    run(runner, [chunked], rng, largest=30)
    runner = Runner.load(pair.folder, device=device, ops=ops, num_pages=PAGES, page_size=PAGE_SIZE)
    return whole, difference(chunked, expected), ragged(runner, pair, rng)


def ragged(runner: Runner, pair: Pair, rng: np.random.Generator) -> float:
    first = Sequenced(random_ids(rng, 30), list(range(8)))
    run(runner, [first], rng)
    runner.copy_pages([PageCopy(5, 20, SHARED % PAGE_SIZE)])
    behind = np.concatenate([first.ids[:SHARED], random_ids(rng, 26)])
    sequences = [
        Sequenced(behind, [*range(5), *range(20, 27)], done=SHARED),
        Sequenced(random_ids(rng, 5), [30, 31]),
        Sequenced(random_ids(rng, 33), list(range(40, 49))),
    ]
    run(runner, sequences, rng, largest=20)
    return max(difference(sequence, pair.logits(sequence.ids)) for sequence in (first, *sequences))


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, VOCAB, count).astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
