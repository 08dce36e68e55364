"""W16: drafts on against off, on the bundled model. Prints a table, can write JSON.

    python -m tests.benchmarks.bench_drafts [--pairs 9] [--count 12] [--json FILE]

The model's own tasks, of which some repeat what they read and some do not, one request after the other; two of them as
many at once as still draft; text drawn at temperature 2 from a bare start, which repeats little, one request and as
many as draft; and, to see what a step with a draft is worth, guesses of which each token is right in four of five
cases. The prompts are cached.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from niwaki.runtime.api import SamplingParams
from niwaki.runtime.bundled.trials import TRIALS, trials
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.decoding import Decoding
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import DRAFT_ROWS, NOTHING
from niwaki.runtime.requests.request import Request
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, number_of_pairs, table, write_json

AIM = ">= 0.98"
RIGHT = 0.8  # of the tokens of synthetic guesses
MADE_UP = 7  # tokens of one, as the engine's own
HOT = 2.0  # temperature: at 1 a model as small as this one repeats itself

Asked = tuple[TokenIds, SamplingParams]


def prompts_of(engine: Engine, task: str, count: int) -> list[Asked]:
    """The first question of each trial, with room for its answer and some more."""
    asked: list[Asked] = []
    for trial in trials(task, count, 7):
        prompt, answer = trial.checks[0]
        room = len(engine.tokenizer.plain_ids(answer)) + 16
        params = SamplingParams(temperature=0.0, max_new_tokens=room)
        asked.append((np.array(engine.tokenizer.plain_ids(prompt), np.int32), params))
    return asked


def bare(count: int, temperature: float, size: int = 96) -> list[Asked]:
    """Nothing stands before them."""
    return [
        (
            np.array([index + 300], np.int32),
            SamplingParams(temperature=temperature, seed=index, max_new_tokens=size, ignore_eos=True),
        )
        for index in range(count)
    ]


def answers(engine: Engine, asked: Sequence[Asked], at_once: int = 1) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for first in range(0, len(asked), at_once):
        running = [engine.backend.start(ids, params) for ids, params in asked[first : first + at_once]]
        found += [generation.result(120)[0].token_ids for generation in running]
    return found


def measured(
    name: str, drafting: Engine, plain: Engine, asked: Sequence[Asked], at_once: int, pairs: int
) -> Comparison:
    before = drafting.stats()

    def notes() -> dict[str, float]:
        after = drafting.stats()
        told = {key: after[key] - before[key] for key in ("guessed_tokens", "drafted_tokens", "generated_tokens")}
        right = told["drafted_tokens"] / max(1, told["guessed_tokens"])
        return {"drafted share": told["drafted_tokens"] / told["generated_tokens"], "right": right}

    def run(engine: Engine) -> Callable[[], None]:
        return lambda: (answers(engine, asked, at_once), None)[1]

    shape = f"{len(asked)} texts, {at_once} at once"
    return compare(name, shape, ("drafts", run(drafting)), ("none", run(plain)), aim=AIM, pairs=pairs, notes=notes)


def foreseen(drafting: Engine, plain: Engine, count: int, pairs: int) -> Comparison:
    """Greedy texts, guessed from what the other engine wrote, a token in five wrong."""
    asked = bare(count, 0.0)
    texts = [
        np.concatenate([ids, np.array(text, np.int32)])
        for (ids, _), text in zip(asked, answers(plain, asked), strict=True)
    ]
    # Made beforehand: a guess of the engine's own takes the host less time than to draw it.
    wrong = np.random.default_rng(1).random((4096, MADE_UP)) > RIGHT
    turns = itertools.cycle(wrong)

    def guess(request: Request, most: int, echo: int) -> TokenIds:
        coming = texts[request.seed][request.length : request.length + min(MADE_UP, request.remaining_new - 1)].copy()
        if most and len(coming):
            coming[next(turns)[: len(coming)]] = 5
            return coming
        return NOTHING

    with patch.object(Request, "guess", guess), patch.object(Decoding, "hears_echo", lambda batch: True):
        return measured("80 % right", drafting, plain, asked, 1, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=number_of_pairs, default=MIN_PAIRS + 4)
    parser.add_argument("--count", type=int, default=12, help="texts of each kind")
    parser.add_argument("--only", nargs="*", help="kinds to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Comparison] = []
    with Engine(kv_tokens=65_536) as drafting, Engine(kv_tokens=65_536, draft_tokens=0) as plain:
        kinds = {task: (prompts_of(plain, task, options.count), 1) for task in TRIALS}
        kinds |= {f"{task}, many": (kinds[task][0], DRAFT_ROWS) for task in ("extraction", "passage")}
        kinds |= {"fresh": (bare(options.count, HOT), 1), "fresh, many": (bare(options.count, HOT), DRAFT_ROWS)}
        for kind, (asked, at_once) in kinds.items():
            if not options.only or kind in options.only:
                found.append(measured(kind, drafting, plain, asked, at_once, options.pairs))
                print(table(found[-1:]), flush=True)
        if not options.only or "80 % right" in options.only:
            found.append(foreseen(drafting, plain, options.count, options.pairs))
    print(table(found))
    if options.json is not None:
        write_json(options.json, found, {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
