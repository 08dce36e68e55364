"""Kinds of input that stopped, crashed or stretched other engines of constraints: each is compiled or refused soon, no
mask is empty or late, the next one compiles, and neighbours go on. (Schemas alone: `test_schema_walls.py`.)"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

import niwaki as nw
from niwaki.runtime.api import Choices, Constraint, ConstraintError, Grammar, JsonSchema, NiwakiError, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from tests.lang.waiting import PATIENCE

END = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None], {END})
COMPILE_SECONDS = 5.0  # of this process, on a machine that has other things to do; alone none takes two
STEP_SECONDS = 0.5  # likewise; alone 0.05
NUM_STEPS = 12


def schema(value: object) -> JsonSchema:
    return JsonSchema(json.dumps(value))


def one_of_three(depth: int) -> dict[str, object]:
    if depth == 0:
        return {"type": "integer"}
    inner = one_of_three(depth - 1)
    return {"oneOf": [{"properties": {name: inner}, "required": [name]} for name in "abc"]}


def binary(depth: int) -> object:
    return (
        {"const": depth}
        if not depth
        else {"anyOf": [{"items": binary(depth - 1)}, {"properties": {"a": binary(depth - 1)}}]}
    )


WORDS = [f"word{number:05}" for number in range(20_000)]
HOSTILE: dict[str, Constraint] = {
    "regex: 20,000 alternatives": Regex("|".join(WORDS)),
    "regex: 6,000 alternatives": Regex("|".join(WORDS[:6000])),
    "regex: a long run of any": Regex('[^"]{0,50000}'),
    "regex: a million of one": Regex("a{1000000}"),
    "regex: a hundred thousand of one": Regex("a{100000}"),
    "regex: a literal of 20,000": Regex("ab" * 10_000),
    "regex: exponential with 14": Regex("(a|b)*a(a|b){14}"),
    "regex: exponential with 20": Regex("[ab]*a[ab]{20}"),
    "regex: 500 powers": Regex(f"({'|'.join('a' * count for count in range(1, 500))})*"),
    "regex: nothing at all": Regex(r"[^\s\S]"),
    "regex: begins with NUL": Regex("\0a"),
    "regex: empty in a star": Regex("((a?)*)*"),
    "regex: counts of 50 in counts": Regex("((x{0,50}){0,50}){0,50}"),
    "regex: 30,000 brackets": Regex("(" * 30_000 + ")" * 30_000),
    "choices: 10,000": Choices(tuple(WORDS[:10_000])),
    "choices: 100,000": Choices(tuple(f"{number}" for number in range(100_000))),
    "grammar: chain of 2,000 rules": Grammar(
        "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(2000)) + '\nr2000 ::= "a"', "ebnf"
    ),
    "grammar: ambiguous plus": Grammar('root ::= x+\nx ::= y | z\ny ::= "a"\nz ::= "a"', "ebnf"),
    "grammar: ambiguous doubling": Grammar('root ::= root root | root root root | "a" | ""', "ebnf"),
    "grammar: stars of stars": Grammar('root ::= (("a"?)*)*', "ebnf"),
    "grammar: 500 powers": Grammar("root ::= (" + " | ".join(f'"{"a" * n}"' for n in range(1, 500)) + ")*", "ebnf"),
    "grammar: never ends": Grammar('root ::= "a" root', "ebnf"),
    "grammar: itself": Grammar("root ::= root", "ebnf"),
    "grammar: left recursion": Grammar('root ::= root "a" | "b"', "ebnf"),
    "grammar: unknown rule": Grammar("root ::= nothing", "ebnf"),
    "grammar: 30,000 brackets": Grammar(f"start: {'(' * 30_000}{')' * 30_000}"),
    "grammar: NUL": Grammar('start: "\0"'),
    "grammar: 20,000 alternatives": Grammar("start: " + " | ".join(f'"{word}"' for word in WORDS)),
    "grammar: 4,000 alternatives": Grammar("start: " + " | ".join(f'"{word}"' for word in WORDS[:4000])),
    "schema: 1,000 references": schema(
        {"$ref": "#/$defs/d0", "$defs": {**{f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1000)}, "d1000": {}}}
    ),
    "schema: constants, 20,000": schema({"enum": WORDS}),
    "schema: constants to choose, 20,000": schema({"anyOf": [{"const": word} for word in WORDS]}),
    "schema: constants beyond the limit": schema({"enum": [f"{'x' * 50}{number}" for number in range(70_000)]}),
    "schema: 1,000 optional keys": schema({"properties": {f"k{n}": {"type": "null"} for n in range(1000)}}),
    "schema: 2,000 required keys": schema(
        {"properties": {f"k{n}": {} for n in range(2000)}, "required": [f"k{n}" for n in range(2000)]}
    ),
    "schema: 300 patterns of keys": schema({"patternProperties": {f"^k{n}x*$": {"const": n} for n in range(300)}}),
    "schema: 1,000 objects to choose": schema(
        {"anyOf": [{"properties": {f"k{n}": {"const": n}}, "required": [f"k{n}"]} for n in range(1000)]}
    ),
    "schema: a tree of choices": schema(binary(10)),
    "schema: one of three, 4 deep": schema(one_of_three(4)),
    "schema: one of three, 6 deep": schema(one_of_three(6)),
    "schema: minLength alone": schema({"type": "string", "minLength": 7000}),
    "schema: 60 lengths": schema({"properties": {f"k{n}": {"type": "string", "maxLength": 50 + n} for n in range(60)}}),
    "schema: NUL in a pattern": schema({"type": "string", "pattern": "\0+"}),
    "schema: text nested 2,000 deep": JsonSchema('{"not":' * 2000 + "{}" + "}" * 2000),
    "schema: both kinds at once": schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "schema: names of an unknown type": schema({"type": "text"}),
    "schema: a prime step": schema({"type": "integer", "multipleOf": 999_983, "minimum": 1}),
}  # fmt: skip


BESIDE = [
    "grammar: 4,000 alternatives", "grammar: chain of 2,000 rules", "regex: 6,000 alternatives",
    "regex: a million of one", "regex: nothing at all", "schema: 60 lengths", "schema: constants, 20,000",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(BYTES)
    yield made
    made.close()


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(BYTES.num_words, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_compiled_or_refused_soon_and_every_step_is_short(name: str, compiler: ConstraintCompiler) -> None:
    began = time.process_time()
    try:
        compiled = compiler.compile(HOSTILE[name])
    except ConstraintError as error:
        if not 20 < len(str(error)) < 700:
            pytest.fail(f"the reason should be a sentence: {error}")
        compiled = None
    assert time.process_time() - began < COMPILE_SECONDS
    if compiled is not None:
        matcher, draw = compiled.matcher(), random.Random(0)
        for remaining in range(NUM_STEPS, 0, -1):
            began = time.process_time()
            tokens = [token for token in allowed(matcher) if matcher.admits(token, remaining)][:20]
            assert tokens, "an empty mask would end no text"
            matcher.accept(draw.choice(tokens))
            assert time.process_time() - began < STEP_SECONDS
            if matcher.is_done:
                break
    assert compiler.compile(Regex("(a|b)*b")).matcher().distance == 1
    assert compiler.compile(JsonSchema('{"type": "null"}')).matcher().shortest_ending(9) is not None


def test_a_limit_of_the_engine_that_a_grammar_meets_is_the_reason_given(compiler: ConstraintCompiler) -> None:
    with pytest.raises(ConstraintError, match="4001 items"):
        compiler.compile(HOSTILE["grammar: 4,000 alternatives"])


def text_of(result: object) -> str:
    assert isinstance(result, dict)
    return str(result["text"])


def test_a_steady_stream_goes_on_beside_hostile_requests() -> None:
    """B2 of the scorecard: four at a time, while another request decodes. Its tokens are those of a run alone, and it
    never hangs."""
    params = {"temperature": 0.0, "max_new_tokens": 160, "ignore_eos": True}
    kinds = [HOSTILE[name] for name in BESIDE]
    with nw.Engine(dtype="float32", kv_tokens=4096) as engine:
        alone = text_of(engine.generate("A steady stream", params))
        outcomes: list[str] = []

        def ask(kind: Constraint) -> None:
            try:
                engine.generate("x", {"constraint": kind, "max_new_tokens": 4, "temperature": 1.0})
                outcomes.append("done")
            except NiwakiError as error:
                outcomes.append(type(error).__name__)

        waits: list[float] = []
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, kind) for kind in kinds]
            while not all(future.done() for future in asked):
                before = time.monotonic()
                text = ""
                for piece in engine.generate("A steady stream", params, stream=True):
                    waits.append(time.monotonic() - before)
                    before = time.monotonic()
                    text = text_of(piece)
                assert text == alone
        assert len(outcomes) == len(kinds)
        assert set(outcomes) <= {"done", "ConstraintError"}
        assert max(waits) < PATIENCE, "how long they are is for bench_stall to say"
        stats = engine.stats()
        assert stats["requests_running"] == stats["requests_waiting"] == 0


def test_what_leaves_no_token_ends_its_own_request_only() -> None:
    """B5: a dead end, every allowed token disliked, the end banned."""
    with nw.Engine(dtype="float32", kv_tokens=2048) as engine:
        yes_or_no = {"choices": ["yes", "no"], "max_new_tokens": 6, "temperature": 0.0}
        words = {"yes", "no", "y", "n", "ye"}
        disliked = {
            i: -100.0 for i, text in enumerate(engine.tokenizer.token_bytes) if (text or b"").decode("latin") in words
        }
        assert text_of(engine.generate("x", {**yes_or_no, "logit_bias": disliked})) in ("yes", "no")
        with pytest.raises(ConstraintError, match="no character is in this set"):
            engine.generate("x", {"regex": r"[^\s\S]", "max_new_tokens": 6})
        assert text_of(engine.generate("x", {**yes_or_no, "min_tokens": 6})) in ("yes", "no")
        assert text_of(engine.generate("x", yes_or_no)) in ("yes", "no")


def test_many_schemas_stay_within_the_caches_bytes_and_write_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: a hot one stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiler = ConstraintCompiler(BYTES, max_bytes=2_000_000)
    hot = compiler.compile(schema({"const": "hot"}))
    for number in range(300):
        compiler.compile(schema({"type": "object", "properties": {f"k{number}": {"type": "integer"}}}))
        assert compiler.compile(schema({"const": "hot"})) is hot
        assert compiler.num_bytes <= 2_000_000
    assert 2 <= len(compiler) < 100
    assert not list(tmp_path.iterdir())
    compiler.close()


WALKED: list[object] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["b"]},
    {"type": "array", "items": {"type": ["integer", "null", "boolean"]}, "minItems": 2, "maxItems": 9},
    {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "exclusiveMaximum": 2.5}]},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"enum": ["a", 1]}},
    {"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}},
    {"type": "string", "pattern": "^[a-f]+(-[0-9]{2,4})*$", "maxLength": 20},
    {"type": "array", "items": {"enum": [1, 2, 3, "x"]}, "uniqueItems": True, "minItems": 2},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": {}, "n": {"$ref": "#/$defs/t"}}}}},
    {"type": "object", "additionalProperties": {"type": "string", "minLength": 3}, "minProperties": 1},
    {"if": {"type": "integer"}, "then": {"multipleOf": 5}, "else": {"type": ["string", "array"]}},
]


@pytest.mark.parametrize("wanted", WALKED, ids=str)
def test_random_steps_lead_to_valid_texts_and_an_end_is_always_in_reach(
    wanted: object, compiler: ConstraintCompiler
) -> None:
    """I5."""
    compiled = compiler.compile(schema(wanted))
    draw = random.Random(4)
    for _ in range(12):
        matcher, text = compiled.matcher(), b""
        for remaining in range(80, 0, -1):
            tokens = allowed(matcher)
            token = next(one for one in draw.sample(tokens, len(tokens)) if matcher.admits(one, remaining))
            if not draw.randrange(12):
                ending = matcher.clone().shortest_ending(remaining)
                assert ending is not None
                text += bytes(ending)
                break
            matcher.accept(token)
            if token == END:
                break
            text += bytes([token])
        jsonschema.validate(json.loads(text), wanted)
