"""The claims of exactness at full size, which the tests check in small; each prints its counts, and any fault fails.

    python -m tests.benchmarks.bench_exact --only regexes     # 500 regexes against Python's, all strings to length 8
    python -m tests.benchmarks.bench_exact --only forcing     # 1,000 sampled texts, forced and drawn, token by token
    python -m tests.benchmarks.bench_exact --only budgets     # 1,000 schemas of JSONSchemaBench, from 4 tokens up
    python -m tests.benchmarks.bench_exact --only steps       # 1,000,000 random tokens under 500 of these
    python -m tests.benchmarks.bench_exact --only cache       # 100,000 schemas, one after the other
    python -m tests.benchmarks.bench_exact --only streams     # 100,000 texts of random tokens, piece by piece

Budgets: tokens are drawn uniformly from the masks, which is harder on a budget than any model. Where the shortest text
fits, the text has to end in time and to be valid in `jsonschema`'s eyes; where not, it is incomplete. Steps: likewise,
without a budget; from one place in a hundred an end is looked for, and a text that grows long is given the one found
(where none is found with the effort of one place, the text is given up: counted, no fault).
Cache: it stays within its bytes, keeps what is asked for again and again, and no file is written. Streams: tokens that
cut characters, and stop strings over their ends: the pieces that are shown add up to the decoded text before its first
stop, so no U+FFFD is in them that the whole text does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice, product
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np

from niwaki.runtime import bundled
from niwaki.runtime.api import ConstraintError, JsonSchema, Regex, Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.requests.stops import StopText
from niwaki.runtime.sampling.redraw import MAX_REDRAWS
from tests.benchmarks.bench_schemas import bench_cases
from tests.runtime.derivatives import random_regex
from tests.runtime.test_constraints_masks import BYTES_AND_WORDS
from tests.runtime.test_forced_tokens import TEXTS, runs
from tests.toy import make_tokenizer

ALPHABETS = ("ab", "aé")
MAX_LENGTH = 8
STEPS_A_SCHEMA = 2000
LONGEST = 1_000_000
CACHE_BYTES = 256 * 1024 * 1024
KINDS_OF_SCHEMAS: Sequence[Callable[[int], dict[str, object]]] = (
    lambda n: {"type": "object", "properties": {f"k{n}": {"type": "integer"}, "name": {"type": "string"}}},
    lambda n: {"type": "array", "items": {"enum": [n, "x", str(n)]}, "maxItems": 5},
    lambda n: {"type": "string", "maxLength": 10 + n % 50, "pattern": f"^a{n}"},
    lambda n: {"anyOf": [{"type": "integer", "minimum": n}, {"const": f"v{n}"}]},
)
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


def compiled_schemas(
    vocabulary: Vocabulary, counts: Counter[str], count: int, first: int
) -> Iterator[tuple[str, CompiledConstraint, Any]]:
    """So many that are not refused, from case `first` on: its name, itself, a validator of exact numbers."""
    compiler = ConstraintCompiler(vocabulary, seconds=10, max_bytes=1)
    for case in islice(bench_cases(0, 0), first, None):
        if counts["schemas"] == count:
            break
        try:
            compiled = compiler.compile(JsonSchema(json.dumps(case.schema)))
        except ConstraintError:
            counts["refused"] += 1
            continue
        counts["schemas"] += 1
        schema = decimal(json.dumps(case.schema))
        yield (
            case.name,
            compiled,
            jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema),
        )
    compiler.close()


def budgets(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    draw = random.Random(first)
    tokens, vocabulary = bundled_vocabulary()
    for name, compiled, validator in compiled_schemas(vocabulary, counts, count, first):
        start = compiled.matcher()
        shortest = start.distance
        for budget in (*BUDGETS, shortest, shortest + 1, shortest + 10):
            matcher = start.clone()
            text = b"".join(tokens[token] or b"" for token in drawn_tokens(matcher, draw, budget, vocabulary))
            counts["texts"] += 1
            counts["complete"] += matcher.can_end
            counts["too little for any text"] += shortest > budget
            if matcher.can_end < (shortest <= budget) or (matcher.can_end and not validator.is_valid(decimal(text))):
                counts["FAULTS"] += 1
                print(f"{name} within {budget}: {text[:200]!r}", file=sys.stderr)
    return counts


def steps(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    draw = random.Random(first)
    tokens, vocabulary = bundled_vocabulary()
    for name, compiled, validator in compiled_schemas(vocabulary, counts, count, first):
        before = counts["tokens"]
        while counts["tokens"] < before + STEPS_A_SCHEMA:
            matcher = compiled.matcher()
            text, is_reachable = walked(matcher, draw, counts, tokens, vocabulary)
            counts["texts"] += 1
            counts["no end found"] += not is_reachable
            if is_reachable and not validator.is_valid(decimal(text)):
                counts["FAULTS"] += 1
                print(f"{name}: {text[:200]!r}", file=sys.stderr)
    return counts


def walked(
    matcher: Matcher, draw: random.Random, counts: Counter[str], tokens: Sequence[bytes | None], vocabulary: Vocabulary
) -> tuple[bytes, bool]:
    """A text of tokens of the masks, and whether an end was found from everywhere where one was looked for."""
    text = b""
    row = np.zeros(vocabulary.num_words, np.uint32)
    for _ in range(draw.choice((20, 60, 150, 300))):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(draw.choice(allowed))
        counts["tokens"] += 1
        matcher.accept(token)
        if token in vocabulary.eos_ids:
            return text, True
        text += tokens[token] or b""
        if draw.random() < 0.01:
            counts["ends looked for"] += 1
            if matcher.clone().shortest_ending(LONGEST) is None:
                return text, False
    ending = matcher.shortest_ending(LONGEST)
    return text + b"".join(tokens[token] or b"" for token in ending or ()), ending is not None


def cache(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    _, vocabulary = bundled_vocabulary()
    hot = JsonSchema('{"const": "hot"}')
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        os.chdir(folder)
        compiler = ConstraintCompiler(vocabulary, max_bytes=CACHE_BYTES)
        kept = compiler.compile(hot)
        for number in range(first, first + count):
            compiler.compile(JsonSchema(json.dumps(KINDS_OF_SCHEMAS[number % len(KINDS_OF_SCHEMAS)](number))))
            counts["schemas"] += 1
            if number % 50 == 0:
                counts["FAULTS"] += compiler.compile(hot) is not kept
            if number % 1000 == 0:
                counts["most MiB"] = max(counts["most MiB"], compiler.num_bytes >> 20)
                counts["FAULTS"] += compiler.num_bytes > CACHE_BYTES
        compiler.close()
        counts["FAULTS"] += len(os.listdir(folder))
        os.chdir("/")
    return counts


def streams(count: int, first: int) -> Counter[str]:
    counts = Counter(FAULTS=0)
    draw = random.Random(first)
    tokenizer = Tokenizer(Path(bundled.MODEL_DIR))
    texts = [number for number, text in enumerate(tokenizer.token_bytes) if text is not None]
    torn = [number for number in texts if _is_torn(tokenizer.token_bytes[number] or b"")]
    for _ in range(count):
        ids: list[int] = []
        for _ in range(draw.randint(0, 24)):
            whole = draw.choice(("\U0001f98a", "\u6771\u4eac", "na\u00efve", "e\u0301", "\ufffd"))
            cut = tokenizer.encode([Segment(whole)])[: draw.randint(1, 6)]
            ids += draw.choice((cut, [draw.choice(torn)], [draw.choice(texts)], [draw.choice(texts)]))
        decoded = tokenizer.decode(ids)
        ends = [draw.randint(0, len(decoded)) for _ in range(draw.randint(0, 2))]
        stops = tuple(stop for end in ends if (stop := decoded[end : end + draw.randint(1, 4)]))
        incremental, watch = tokenizer.detokenizer(), StopText(stops)
        text = shown = ""
        for token in ids:
            piece = incremental.push(token)
            text += piece
            shown += watch.push(piece)
            if watch.matched is not None:
                break
        if watch.matched is None:
            rest = incremental.finish()
            text += rest
            shown += watch.push(rest)
        if watch.matched is None:
            shown += watch.finish()
        found = [text.find(stop) for stop in stops if stop in text]
        is_right = decoded.startswith(text) and shown == text[: min(found, default=len(text))]
        counts["texts"] += 1
        counts["tokens"] += len(ids)
        counts["torn characters"] += decoded.count("\ufffd")
        counts["stopped"] += watch.matched is not None
        counts["FAULTS"] += not is_right or bool(found) != (watch.matched is not None) or bool(stops) != bool(found)
    return counts


def _is_torn(text: bytes) -> bool:
    """No whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


def bundled_vocabulary() -> tuple[Sequence[bytes | None], Vocabulary]:
    tokens = Tokenizer(Path(bundled.MODEL_DIR)).token_bytes
    return tokens, Vocabulary(tokens, {next(i for i, text in enumerate(tokens) if text is None)})


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
    "steps": (steps, 500),
    "cache": (cache, 100_000),
    "streams": (streams, 100_000),
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
