"""The claims of exactness at full size, which the tests check in small; each prints its counts, and any fault fails.

    python -m tests.benchmarks.bench_exact --only regexes     # 500 regexes against Python's, all strings to length 8
    python -m tests.benchmarks.bench_exact --only forcing     # 1,000 sampled texts, forced and drawn, token by token
    python -m tests.benchmarks.bench_exact --only budgets     # 1,000 schemas of JSONSchemaBench, from 4 tokens up

Budgets: tokens are drawn uniformly from the masks, which is harder on a budget than any model. Where the shortest text
fits, the text has to end in time and to be valid in `jsonschema`'s eyes; where not, it is incomplete.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice, product
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np

from niwaki.runtime import bundled
from niwaki.runtime.api import ConstraintError, JsonSchema, Regex
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.sampling.redraw import MAX_REDRAWS
from tests.benchmarks.bench_schemas import bench_cases
from tests.runtime.test_constraints_masks import BYTES_AND_WORDS, random_regex
from tests.runtime.test_forced_tokens import TEXTS, runs
from tests.toy import make_tokenizer

ALPHABETS = ("ab", "aé")
MAX_LENGTH = 8
BUDGETS = (4, 40, 160)  # and what the shortest text takes, and one more and ten more


def regexes(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    draw = random.Random(first)
    compiler = ConstraintCompiler(BYTES_AND_WORDS, seconds=20)
    strings = ["".join(text) for abc in ALPHABETS for n in range(MAX_LENGTH + 1) for text in product(abc, repeat=n)]
    while counts["regexes"] < count:
        text, _ = random_regex(draw, 5)
        wanted = {string for string in strings if re.fullmatch(text, string)}
        if not wanted:
            continue
        compiled = compiler.compile(Regex(text))
        assert isinstance(compiled, AutomatonConstraint)
        counts["regexes"] += 1
        counts["strings"] += len(strings)
        counts["FAULTS"] += sum(compiled.dfa.accepts(string.encode()) != (string in wanted) for string in strings)
    compiler.close()
    return counts


def forcing(count: int, first: int) -> Counter[str]:
    schema = {"properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]}
    constraint = JsonSchema(json.dumps({**schema, "type": "object", "additionalProperties": False}))
    counts = Counter(FAULTS=0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder), texts=list(TEXTS))
        for start in range(first, first + count, 250):
            seeds = range(start, min(start + 250, first + count))
            forced, drawn = (runs(force, constraint, TEXTS, tokenizer, seeds) for force in (True, False))
            counts["texts"] += len(forced)
            counts["tokens"] += sum(len(output.token_ids) for output in forced)
            counts["forced tokens"] += sum(len(output.forced) for output in forced)
            counts["FAULTS"] += sum(one.token_ids != other.token_ids for one, other in zip(forced, drawn, strict=True))
    return counts


def budgets(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    draw = random.Random(first)
    tokens = Tokenizer(Path(bundled.MODEL_DIR)).token_bytes
    end = next(i for i, text in enumerate(tokens) if text is None)
    vocabulary = Vocabulary(tokens, {end})
    compiler = ConstraintCompiler(vocabulary, seconds=10, max_bytes=1)
    for case in islice(bench_cases(0, 0), first, None):
        if counts["schemas"] == count:
            break
        try:
            start = compiler.compile(JsonSchema(json.dumps(case.schema))).matcher()
        except ConstraintError:
            counts["refused"] += 1
            continue
        counts["schemas"] += 1
        schema = decimal(json.dumps(case.schema))
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        shortest = start.distance
        for budget in (*BUDGETS, shortest, shortest + 1, shortest + 10):
            matcher = start.clone()
            text = b"".join(tokens[token] or b"" for token in drawn_tokens(matcher, draw, budget, vocabulary))
            counts["texts"] += 1
            counts["complete"] += matcher.can_end
            counts["too little for any text"] += shortest > budget
            if matcher.can_end < (shortest <= budget) or (matcher.can_end and not validator.is_valid(decimal(text))):
                counts["FAULTS"] += 1
                print(f"{case.name} within {budget}: {text[:200]!r}", file=sys.stderr)
    compiler.close()
    return counts


def decimal(text: str | bytes) -> Any:
    """As a validator must read it: 304.83 is a multiple of 0.01, in floats it is not."""

    def exact(number: str) -> Decimal | float:
        try:
            return Decimal(number)
        except InvalidOperation:  # an exponent beyond all bounds: infinite or 0
            return float(number)

    return json.loads(text, parse_float=exact)


def drawn_tokens(matcher: Matcher, draw: random.Random, budget: int, vocabulary: Vocabulary) -> list[int]:
    """As the engine draws: again where a token is not admitted, and after some vain draws the shortest ending."""
    found: list[int] = []
    (end,) = vocabulary.eos_ids
    row = np.zeros(vocabulary.num_words, np.uint32)
    for remaining in range(budget, 0, -1):
        matcher.fill_mask_within(row, remaining)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        tried = draw.sample(allowed, min(len(allowed), MAX_REDRAWS))
        token = next((one for one in tried if matcher.admits(one, remaining)), None)
        if token is None:
            token = (*(matcher.shortest_ending(remaining) or ()), end)[0]
        if token == end:
            break
        matcher.accept(token)
        found.append(token)
    return found


KINDS: dict[str, tuple[Callable[[int, int], Counter[str]], int]] = {
    "regexes": (regexes, 500),
    "forcing": (forcing, 1000),
    "budgets": (budgets, 1000),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--count", type=int, help="of regexes, texts or schemas")
    parser.add_argument("--first", type=int, default=0, help="of them, to go through them in pieces")
    given = parser.parse_args(arguments)
    faults = 0
    for name, (count_up, count) in KINDS.items():
        if given.only in (None, name):
            counts = count_up(given.count or count, given.first)
            faults += counts["FAULTS"]
            print(f"{name}:", ", ".join(f"{number:,} {what}" for what, number in counts.items()), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
