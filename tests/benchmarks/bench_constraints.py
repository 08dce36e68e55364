"""What constraints cost and what forced tokens bring: W8, W9 and W10, side by side.

    python -m tests.benchmarks.bench_constraints                 # all; peers that are not installed are left out
    python -m tests.benchmarks.bench_constraints --only W9 --vocab 8192 131072 --batch 1 32 256

W8: JSON of which about 60 % is forced, written with forced tokens and without. W9: time of the masks of a batch along
given texts, a different one in each row, and of telling each row its token ("accept"): ours (new ones, and those of
texts seen before) against llguidance's own matcher on the bare schema and xgrammar's (`pip install niwaki[bench]`), of
a generated vocabulary of words or, for 131072, of Mistral's. *All* are the places of the texts but the first ones,
which some engines spare and others make their longest; *drawn* those where an engine that forces tokens draws one:
forced texts are cut as the texts are, into the longest tokens. W10: a batch under a constraint that forces nothing
against the same batch without one, in turn, and that against itself; told by part, since what the model takes is the
same and swings more than what a constraint adds.
"""

from __future__ import annotations

import argparse
import base64
import functools
import gc
import importlib
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from niwaki.runtime.api import Grammar, JsonSchema, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.guidance import tokenizer_of
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.forced import forced_tokens
from tests.benchmarks.bench_masks import synthetic_vocabulary
from tests.benchmarks.bench_stall import Clock
from tests.benchmarks.harness import Comparison, compare, number_of_pairs, table, write_json

TEKKEN_SIZE = 131_072
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "longer", "the longest of all"]}, "maxItems": 4},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        }
    },
}


def words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(count))


def person(draw: random.Random) -> object:
    address = {"street": words(draw, 3), "zip": f"{draw.randrange(100_000):05}"}
    tags = draw.sample(["a", "longer", "the longest of all"], 2)
    return {"name": words(draw, 2), "age": draw.randint(0, 150), "tags": tags, "address": address}


# schema, and texts of it: strings, bounds, references, unions, numbers
TEXTS: list[tuple[object, Callable[[random.Random], object]]] = [
    (PERSON, person),
    ({"type": "array", "items": {"type": "number"}}, lambda draw: [draw.uniform(-99, 99) for _ in range(3)]),
    (
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        lambda draw: [words(draw, 2), None, words(draw, 3), None],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        lambda draw: {words(draw, 1 + n): n > 0 for n in range(3)},
    ),
]
FORCED = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer", "minimum": 10, "maximum": 99},
        "is_still_subscribed": {"type": "boolean"},
        "preferred_language": {"enum": ["German", "French"]},
        "last_payment_status": {"enum": ["accepted", "declined"]},
        "number_of_complaints": {"type": "integer", "minimum": 0, "maximum": 9},
        "remark": {"type": "string", "minLength": 60, "maxLength": 66},
    },
    "required": [
        "customer_identifier", "is_still_subscribed", "preferred_language", "last_payment_status",
        "number_of_complaints", "remark",
    ],
    "additionalProperties": False,
}  # fmt: skip


def w8(batch: int) -> list[Comparison]:
    prompts = [f"Customer {n}, as JSON: " for n in range(batch)]
    options = {"json_schema": FORCED, "temperature": 0.0, "max_new_tokens": 160}
    with Engine(kv_tokens=32_768) as forced, Engine(kv_tokens=32_768, force_tokens=False) as drawn:

        def share() -> dict[str, float]:
            stats = forced.stats()
            return {"forced share": stats["forced_tokens"] / stats["generated_tokens"]}

        return [
            compare(
                "W8", f"{batch} x JSON",
                ("forced", lambda: _generate(forced, prompts, options)),
                ("drawn", lambda: _generate(drawn, prompts, options)),
                aim=">= 2.2", notes=share,
            )
        ]  # fmt: skip


def w10(batch: int, tokens: int, pairs: int) -> list[Comparison]:
    clock = Clock()
    free: dict[str, object] = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    kinds = {"regex": Regex(r"(?s).*"), "grammar": Grammar(r"start: /(.|\n)*/")}
    with Engine(kv_tokens=32_768) as engine:
        # Equal work: where a text may end, a constraint takes an end token for its end, whatever `ignore_eos` says.
        some = [f"Tell me about {n}." for n in range(2 * batch)]
        written = engine.generate(some, free | {"constraint": kinds["regex"]})
        assert isinstance(written, list)
        prompts: list[str] = []
        for prompt, result in zip(some, written, strict=True):
            ids = result["output_ids"]
            if isinstance(ids, list) and len(ids) == tokens and len(prompts) < batch:
                prompts.append(prompt)
        assert len(prompts) == batch, "too many of the texts end early"

        def seconds(options: dict[str, object]) -> Parts:
            clock.taken_raw()
            began = time.perf_counter()
            _generate(engine, prompts, options)
            whole = time.perf_counter() - began
            outside, worked = clock.taken_raw()
            return Parts(whole, whole - sum(outside), sum(outside), sum(worked))

        ways = {"free": free, "free again": free} | {name: free | {"constraint": kind} for name, kind in kinds.items()}
        for options in ways.values():
            seconds(options)
        gc.collect()
        gc.freeze()
        found: dict[str, list[Parts]] = {name: [] for name in ways}
        for pair in range(pairs):
            names = [*ways][pair % len(ways) :] + [*ways][: pair % len(ways)]
            for name in names:
                found[name].append(seconds(ways[name]))
    return [_w10_of(name, found[name], found["free"], f"{batch} x {tokens}") for name in ways if name != "free"]


class Parts(NamedTuple):
    """Seconds of a round: all of it, what is the model's, what steps take outside the model, and what the loop's thread
    works of that."""

    whole: float
    model: float
    outside: float
    worked: float


def _w10_of(name: str, own: Sequence[Parts], free: Sequence[Parts], shape: str) -> Comparison:
    """Both do the same forward passes: so what the rounds take more is told by part, and `by parts` is the ratio where
    the model takes the same, the median of all."""
    ratios = [b.whole / a.whole for a, b in zip(own, free, strict=True)]
    model = statistics.median(one.model for one in (*own, *free))
    outside = [statistics.median(one.outside for one in rounds) for rounds in (own, free)]
    more = sorted(1000 * (a.model - b.model) for a, b in zip(own, free, strict=True))
    notes = {
        "outside the model, ms": 1000 * outside[0],
        "of free texts": 1000 * outside[1],
        "at work, ms": 1000 * statistics.median(one.worked for one in own),
        "of free texts at work": 1000 * statistics.median(one.worked for one in free),
        "the model longer by ms, quartiles": more[len(more) // 4],
        "median": statistics.median(more),
        "upper": more[3 * len(more) // 4],
        "by parts": (model + outside[1]) / (model + outside[0]),
    }
    return Comparison(
        "W10", f"{shape}, {name}", name, "free", len(own), statistics.median(one.whole for one in own),
        statistics.median(one.whole for one in free), statistics.median(ratios), min(ratios), max(ratios), ">= 0.98",
        notes,
    )  # fmt: skip


def _generate(engine: Engine, prompts: Sequence[str], options: dict[str, object]) -> None:
    results = engine.generate(prompts, options)
    assert isinstance(results, list)
    assert len(results) == len(prompts)


# ---------------------------------------------------------------------------------------------------------------
# W9
# ---------------------------------------------------------------------------------------------------------------


class Peer(Protocol):
    """One engine of masks over one vocabulary."""

    name: str

    def start(self, schema: str, count: int) -> Texts: ...


class Texts(Protocol):
    """`count` texts of one schema, each at a place of its own."""

    def fill(self) -> None: ...

    def accept(self, token_ids: Sequence[int]) -> None: ...


class Ours:
    """`seen`: masks of texts that other requests of the same schema have written before; else every mask is new."""

    def __init__(self, vocabulary: Vocabulary, *, seen: bool) -> None:
        self.name = "niwaki, seen" if seen else "niwaki"
        self._seen = seen
        self._started = 0
        self._compiler = ConstraintCompiler(vocabulary, seconds=20)
        self._filler = MaskFiller(vocabulary.num_words)

    def start(self, schema: str, count: int) -> Texts:
        self._started += 1
        # Another space at the end is another constraint, of which nothing is known yet.
        compiled = self._compiler.compile(JsonSchema(schema if self._seen else schema + " " * self._started))
        matchers = [compiled.matcher() for _ in range(count)]

        def fill() -> None:  # as the engine asks where nothing is done meanwhile
            self._filler.rows(matchers)

        return _Texts(fill, [matcher.accept for matcher in matchers])

    def matcher(self, schema: str) -> Matcher:
        return self._compiler.compile(JsonSchema(schema)).matcher()

    def close(self) -> None:
        self._compiler.close()
        self._filler.close()


class Llguidance:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        llguidance = importlib.import_module("llguidance")
        tokens, ends = vocabulary.token_bytes, sorted(vocabulary.eos_ids)
        slices = llguidance.LLTokenizer.general_slices()
        self._tokenizer = tokenizer_of(tokens, ends, vocabulary.size, slices)
        self._num_words = vocabulary.num_words
        self._matcher, self._executor = llguidance.LLMatcher, llguidance.LLExecutor()

    def start(self, schema: str, count: int) -> Texts:
        compact = {**json.loads(schema), "x-guidance": {"whitespace_flexible": False}}
        grammar = self._matcher.grammar_from_json_schema(json.dumps(compact))
        matchers = [self._matcher(self._tokenizer, grammar) for _ in range(count)]
        rows = np.zeros((count, self._num_words), np.uint32)

        def fill() -> None:
            if count == 1:
                matchers[0].unsafe_compute_mask_ptr(rows.ctypes.data, rows.nbytes)
            else:
                numbered = [(matcher, place) for place, matcher in enumerate(matchers)]
                self._executor.unsafe_compute_mask_ptr(numbered, rows.ctypes.data, 4 * self._num_words, count)

        return _Texts(fill, [matcher.consume_token for matcher in matchers])


class Xgrammar:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._xgrammar = importlib.import_module("xgrammar")
        tokens = [piece or b"<%d>" % i for i, piece in enumerate(vocabulary.token_bytes)]
        info = self._xgrammar.TokenizerInfo(
            tokens, self._xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=sorted(vocabulary.eos_ids)
        )
        self._compiler = self._xgrammar.GrammarCompiler(info)
        self._size = vocabulary.size

    def start(self, schema: str, count: int) -> Texts:
        compiled = self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        matchers = [self._xgrammar.GrammarMatcher(compiled) for _ in range(count)]
        rows = self._xgrammar.allocate_token_bitmask(count, self._size)
        batch = self._xgrammar.BatchGrammarMatcher()

        def fill() -> None:
            if count == 1:
                matchers[0].fill_next_token_bitmask(rows, 0)
            else:
                batch.batch_fill_next_token_bitmask(matchers, rows)

        return _Texts(fill, [matcher.accept_token for matcher in matchers])


class _Texts:
    def __init__(self, fill: Callable[[], None], accepts: Sequence[Callable[[int], object]]) -> None:
        self.fill, self._accepts = fill, accepts

    def accept(self, token_ids: Sequence[int]) -> None:
        for accept, token_id in zip(self._accepts, token_ids, strict=True):
            accept(token_id)


def w9(size: int, batches: Sequence[int], rounds: int, *, takes_fastest: bool) -> Iterator[str]:
    began = time.process_time()
    vocabulary, source = vocabulary_of(size)
    ours = [Ours(vocabulary, seen=False), Ours(vocabulary, seen=True)]
    peers: list[Peer] = [*ours, Llguidance(vocabulary)]
    if importlib.util.find_spec("xgrammar"):
        peers.append(Xgrammar(vocabulary))
    yield f"\nW9, vocabulary of {size} ({source}), set up in {time.process_time() - began:.1f} s of processor time"
    boundaries = Boundaries(vocabulary, lambda text: longest_match(text.encode(), vocabulary))
    for batch in batches:
        first: dict[str, list[float]] = {peer.name: [] for peer in peers}
        later: dict[str, list[float]] = {peer.name: [] for peer in peers}
        moved: dict[str, list[float]] = {peer.name: [] for peer in peers}
        is_drawn: list[bool] = []
        for round_ in range(rounds + 1):  # the first one is not counted: after it texts have been seen
            for schema, text_of in TEXTS:
                rows = [longest_match(json_text(text_of(random.Random(row))), vocabulary) for row in range(batch)]
                drawn = _drawn_places(ours[1].matcher(json.dumps(schema)), rows[0], boundaries) if round_ else set()
                # In turns at every token, so that what else the machine does falls on all alike.
                texts = [(peer.name, peer.start(json.dumps(schema), batch)) for peer in peers]
                for place, token_ids in enumerate(zip(*rows, strict=False)):  # until the shortest text ends
                    if place and round_:
                        is_drawn.append(place in drawn)
                    for name, one in texts if (place + round_) % 2 else reversed(texts):
                        start = time.perf_counter()
                        one.fill()
                        if round_:
                            (later if place else first)[name].append(1e6 * (time.perf_counter() - start))
                        start = time.perf_counter()
                        one.accept(token_ids)
                        if round_:
                            moved[name].append(1e6 * (time.perf_counter() - start))
        if takes_fastest:  # every round has the same places in the same order
            for times in (first, later, moved):
                for name, found in times.items():
                    times[name] = np.reshape(found, (rounds, -1)).min(axis=0).tolist()
            is_drawn = is_drawn[: len(later["niwaki"])]
        yield f"  batch {batch:3}: " + "; ".join(
            f"{name} p50 {np.percentile(later[name], 50):.1f} us, p99 {np.percentile(later[name], 99):.0f}, "
            f"first {np.percentile(first[name], 50):.0f}, accept {np.percentile(moved[name], 50):.1f}, "
            f"p99 with the first ones {np.percentile(first[name] + later[name], 99):.0f}"
            for name in first
        )
        # Of many rows some are drawn nearly everywhere: told apart for one.
        kinds = {"all": np.ones(len(is_drawn), np.bool_)} | ({"drawn": np.array(is_drawn)} if batch == 1 else {})
        for kind, kept in kinds.items():
            own = np.array(later["niwaki"])[kept]
            for name in [*first][1:]:
                other = np.array(later[name])[kept]
                yield (
                    f"             {name} / niwaki, {kind} ({len(own)}): median, pair by pair, "
                    f"{np.median(other / own):.2f}; of the sums {other.sum() / own.sum():.2f}"
                )
            if kind == "drawn":
                yield "             drawn: " + "; ".join(
                    f"{name} p50 {np.percentile(np.array(later[name])[kept], 50):.1f} us, "
                    f"p99 {np.percentile(np.array(later[name])[kept], 99):.0f}"
                    for name in first
                )
    for one_of_ours in ours:
        one_of_ours.close()


def _drawn_places(matcher: Matcher, token_ids: Sequence[int], boundaries: Boundaries) -> set[int]:
    """Where the text has a token that is not forced."""
    found: set[int] = set()
    place = 0
    while place < len(token_ids):
        num_forced = len(forced_tokens(matcher, token_ids[:place], len(token_ids), boundaries))
        place += num_forced
        if place < len(token_ids):
            found.add(place)
            matcher.accept(token_ids[place])
            place += 1
    return found


def vocabulary_of(size: int) -> tuple[Vocabulary, str]:
    found = importlib.util.find_spec("mistral_common") if size == TEKKEN_SIZE else None
    if found is None or found.origin is None:
        return synthetic_vocabulary(size), "generated"
    data = json.loads((Path(found.origin).parent / "data" / "tekken_240911.json").read_text("utf-8"))
    num_special = int(data["config"]["default_num_special_tokens"])
    texts = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][: size - num_special]]
    return Vocabulary([*[None] * num_special, *texts], {2}), "tekken"


@functools.cache
def ids_of(vocabulary: Vocabulary) -> dict[bytes, int]:
    return {piece: i for i, piece in enumerate(vocabulary.token_bytes) if piece}


def json_text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def longest_match(text: bytes, vocabulary: Vocabulary) -> list[int]:
    """The text in the longest tokens from the left."""
    ids = ids_of(vocabulary)
    found: list[int] = []
    while text:
        length = next(n for n in range(min(len(text), vocabulary.max_token_bytes), 0, -1) if text[:n] in ids)
        found.append(ids[text[:length]])
        text = text[length:]
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=["W8", "W9", "W10"])
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, TEKKEN_SIZE])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="of W9")
    parser.add_argument("--rounds", type=int, default=3, help="of W9: how often each text is walked")
    parser.add_argument(
        "--fastest", action="store_true", help="of W9: of each place its fastest round, beside other work"
    )
    parser.add_argument("--rows", type=int, default=32, help="of W8 and W10")
    parser.add_argument("--tokens", type=int, default=64, help="of W10")
    parser.add_argument("--pairs", type=number_of_pairs, default=40, help="of W10")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    results: list[Comparison] = []
    if given.only in (None, "W8"):
        results += w8(given.rows)
    if given.only in (None, "W10"):
        results += w10(given.rows, given.tokens, given.pairs)
    if results:
        print(table(results))
    if given.json and results:
        write_json(given.json, results, {})
    for size in given.vocab if given.only in (None, "W9") else ():
        for line in w9(size, given.batch, given.rounds, takes_fastest=given.fastest):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
