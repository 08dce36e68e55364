"""Hostile schemas: each is compiled or refused within its limits, no mask is empty, and the next one compiles."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest

from niwaki.runtime.api import ConstraintError, Grammar, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary, compile_constraint, sources
from niwaki.runtime.constraints.compile_worker import learn
from niwaki.runtime.constraints.schema import TookTooLong, normalise
from niwaki.runtime.constraints.schema.document import Json, Watch, most_counted
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS
from niwaki.runtime.constraints.schema.spelling import text_terminal
from niwaki.runtime.constraints.sources import answer, read_answer, request_for, too_complex

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None], {256})
SECONDS = 1.0
PROCESSOR_SECONDS = 8.0  # of this process, on a machine with other things to do; alone none takes two


def chain(length: int) -> dict[str, object]:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)} | {f"d{length}": {"type": "null"}}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def levels(depth: int, names: str) -> dict[str, object]:
    """Objects in objects, by reference, each under every one of the names."""
    parts: dict[str, object] = {
        f"d{i}": {"properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in names}} for i in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "null"}}}


def nested(keyword: str, depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


def tree(depth: int) -> object:
    return {"const": depth} if depth == 0 else {"anyOf": [{"items": tree(depth - 1)}, {"contains": tree(depth - 1)}]}


HOSTILE: dict[str, object] = {
    "a chain of references": chain(600),
    "parts in parts": levels(120, "a"),
    "shared parts in parts": levels(170, "ab"),
    "a reference to itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
    "a value that holds itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "not nested": nested("not", 60),
    "items nested": nested("items", 60),
    "a large prime": {"type": "integer", "multipleOf": 999_983},
    "many digits": {"type": "integer", "multipleOf": 0.123456789},
    "far bounds": {"type": "integer", "minimum": -(10**200), "maximum": 10**200},
    "600 optional keys": {"properties": {f"k{i}": {} for i in range(600)}},
    "600 required keys": {"properties": {f"k{i}": {} for i in range(600)}, "required": [f"k{i}" for i in range(600)]},
    "patterns of keys": {"patternProperties": {f"^k{i}x*$": {"const": i} for i in range(60)}},
    "overlapping patterns of keys": {"patternProperties": {f"[a-z]{{{i}}}": {"minimum": i} for i in range(1, 20)}},
    "pairs of anyOf": {"allOf": [{"anyOf": [{"minimum": i}, {"multipleOf": i + 1}]} for i in range(20)]},
    "products of anyOf": {"allOf": [{"anyOf": [{"required": [f"{x}{i}"]} for i in range(20)]} for x in "abc"]},
    "oneOf of ranges": {"oneOf": [{"minimum": i, "maximum": i + 2} for i in range(40)]},
    "a tree of anyOf": tree(7),
    "many constants": {"enum": [f"constant {i}" for i in range(5_000)]},
    "not many constants": {"type": "string", "not": {"enum": [f"constant {i}" for i in range(300)]}},
    "a long text": {"type": "string", "minLength": 20_000, "maxLength": 20_000},
    "a longest text": {"type": "string", "maxLength": 10**6},
    "a long array": {"type": "array", "minItems": 10**6},
    "counted counts": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "an exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
    "its complement": {"type": "string", "not": {"pattern": "^(a|b)*a(a|b){20}$"}},
    "patterns together": {"allOf": [{"type": "string", "pattern": f"^(?:[ab]*a[ab]{{{n}}})*$"} for n in (7, 11, 13)]},
    "backtracking": {"type": "string", "pattern": "^(a+)+$", "enum": ["a" * 300 + "!", "a"]},
    "much to contain": {"contains": {"minimum": 1}, "minContains": 1000, "maxContains": 2000},
    "several to contain": {"allOf": [{"contains": {"const": i}, "maxContains": 9} for i in range(6)], "type": "array"},
    "unique letters": {"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefghijklmnopqrst")}},
    "keys by number": {"properties": {f"k{i}": {} for i in range(24)}, "minProperties": 12, "maxProperties": 13},
    "keys that depend": {"dependentRequired": {f"k{i}": [f"k{i + 1}"] for i in range(40)}},
    "if in if": nested("if", 40),
    "nothing at all": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "a number as a name": {"properties": {"": {"enum": [None]}, "\u0000": {}, "\\": {}, '"': {}}, "minProperties": 1},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(BYTES, seconds=SECONDS)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_compiled_or_refused(name: str, compiler: ConstraintCompiler) -> None:
    began = time.process_time()
    try:
        compiled = compiler.compile(JsonSchema(json.dumps(HOSTILE[name])))
    except ConstraintError as error:
        if not 20 < len(str(error)) < 600:
            pytest.fail(f"the reason should be a sentence: {error}")
    else:
        row = np.zeros(BYTES.num_words, np.uint32)
        matcher = compiled.matcher()
        for remaining in range(12, 0, -1):
            matcher.fill_mask_within(row, remaining)
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            allowed = [token for token in tokens if matcher.admits(token, remaining)]
            assert allowed
            matcher.accept(allowed[len(allowed) // 2])
            if matcher.is_done:
                break
    assert time.process_time() - began < PROCESSOR_SECONDS
    assert compiler.compile(JsonSchema('{"type": "null"}')).matcher().shortest_ending(9) is not None


def alternatives(count: int, num_keys: int, *, first: dict[str, dict[str, object]] | None = None) -> dict[str, object]:
    """Objects of the same keys, any of which may be left out, with another last one; those of `first` must come."""
    keys: dict[str, object] = {f"k{i}": {"type": "integer"} for i in range(num_keys)}
    found = []
    for number in range(count):
        wanted = {key: {"const": number} if part == {} else part for key, part in (first or {}).items()}
        last = {"z": {"type": "string", "minLength": number + 1}}
        found.append({"type": "object", "properties": {**wanted, **keys, **last}, "required": [*wanted]})
    return {"anyOf": found}


@pytest.mark.parametrize(
    "schema",
    [
        alternatives(50, 50),
        alternatives(50, 50, first={"a": {"type": "string"}}),
        {"type": "array", "items": {"properties": {"a": alternatives(50, 50)}}},
        {"anyOf": [{"properties": {"a": alternatives(10, 50 + i)}, "required": ["a"]} for i in range(6)]},
    ],
)
def test_more_ways_to_go_on_than_the_engine_takes_are_refused_at_once(schema: dict[str, object]) -> None:
    """Its limit of 5,000 ended such texts behind the first bracket, or later."""
    with pytest.raises(ConstraintError, match=r"^schema at its root: a text may go on in \d+ ways at one place"):
        compile_constraint(JsonSchema(json.dumps(schema)), BYTES, seconds=20)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (alternatives(45, 45), '{"k0":1,"k44":2,"z":"'),
        (alternatives(50, 50, first={"a": {}}), '{"a":49,"k0":1,"k49":2,"z":"'),
        (
            {"properties": {x: alternatives(30, 60) for x in "ab"}},
            '{"a":{"k0":1,"z":"' + "a" * 30 + '"},"b":{"k7":1,"z":"',
        ),
    ],
)
def test_as_many_ways_as_the_engine_takes_are_taken(schema: dict[str, object], text: str) -> None:
    matcher = compile_constraint(JsonSchema(json.dumps(schema)), BYTES, seconds=20).matcher()
    row = np.zeros(BYTES.num_words, np.uint32)
    for byte in text.encode():
        matcher.fill_mask(row)
        matcher.accept(byte)


@pytest.mark.parametrize("asked", [{"contains": {"const": 1}}, {"contains": {"type": "number"}, "minContains": 30}])
def test_an_array_that_must_contain_something_may_have_any_number_of_items(
    asked: dict[str, object], compiler: ConstraintCompiler
) -> None:
    """At each item all before it were gone through: one took 0.4 s behind 300, and behind 5,000 the text failed."""
    matcher = compiler.compile(JsonSchema(json.dumps({"type": "array", **asked}))).matcher()
    began = time.process_time()
    for byte in b"[" + b"1," * 6000 + b"1":
        matcher.accept(byte)
    row = np.zeros(BYTES.num_words, np.uint32)
    matcher.fill_mask(row)
    matcher.accept(ord("]"))
    assert matcher.is_done
    assert time.process_time() - began < PROCESSOR_SECONDS / 2


@pytest.mark.parametrize(
    ("schema", "is_tame"),
    [
        ({"pattern": "^a{500}$"}, True),
        ({"pattern": "^(a{501})?$"}, False),
        ({"pattern": "^(a{1000})?$"}, False),
        ({"pattern": "^(a{1000,})?$"}, False),
        ({"pattern": "^a{0,1000}$"}, False),
        ({"pattern": "^(?!(a|b)*a(a|b){99}$)[ab]*$"}, True),
        ({"pattern": "^(?!(a|b)*a(a|b){200}$)[ab]*$"}, False),
        ({"pattern": "^(a|b)*$", "maxLength": 60000}, True),
        ({"pattern": "^(?=.*a.{99}$)(?=.*b.{98}$)[ab]*$", "maxLength": 60000}, False),
    ],
)
def test_what_counts_far_is_tried_beside(schema: dict[str, object], is_tame: bool) -> None:
    assert normalise(json.dumps({"type": "string", **schema})).is_tame is is_tame


SIZES = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]


@pytest.mark.parametrize("count", ["70000", "1e6", "1e12", "1e308", "9" * 200])
@pytest.mark.parametrize("keyword", ["minLength", "minItems", "minProperties"])
def test_a_least_size_that_no_text_reaches_is_refused_at_its_place(keyword: str, count: str) -> None:
    schema = f'{{"properties": {{"a": {{"{keyword}": {count}}}}}}}'
    with pytest.raises(ConstraintError, match=rf"schema at /properties/a/{keyword}: asks for .* at most 65536"):
        normalise(schema)


@pytest.mark.parametrize("count", ["1e9", "4294967296", "1e12", "1e308", "9" * 200])
@pytest.mark.parametrize("keyword", ["maxLength", "maxItems", "maxProperties"])
def test_a_largest_size_beyond_any_context_is_compiled(keyword: str, count: str) -> None:
    kind = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}[keyword]
    compiled = compile_constraint(JsonSchema(f'{{"type": "{kind}", "{keyword}": {count}}}'), BYTES)
    assert compiled.matcher().shortest_ending(budget=9) is not None


@pytest.mark.parametrize("count", ["-1", "2.5", "true", "null", '"3"'])
@pytest.mark.parametrize("keyword", SIZES)
def test_a_size_that_is_no_count_is_refused_at_its_place(keyword: str, count: str) -> None:
    kind = {"Le": "string", "It": "array", "Pr": "object", "Co": "array"}[keyword[3:5]]
    for beside in ("", f'"type": "{kind}", '):
        with pytest.raises(ConstraintError, match=rf"schema at /{keyword}: must be a whole number from 0 on"):
            normalise(f'{{{beside}"{keyword}": {count}}}')


@pytest.mark.parametrize("keyword", SIZES)
def test_a_size_may_be_written_with_a_point(keyword: str) -> None:
    assert normalise(f'{{"{keyword}": 1.0}}').schema == normalise(f'{{"{keyword}": 1}}').schema


def test_what_takes_too_long_is_refused_at_the_keyword_that_counts_furthest(compiler: ConstraintCompiler) -> None:
    patterns = [{"pattern": f"a.{{{count}}}b"} for count in range(395, 405)]
    parts = {"b": {"maxItems": 300}, "a/b": {"type": "string", "allOf": patterns}}
    with pytest.raises(
        ConstraintError, match=r"^schema at /properties/a~1b/allOf/9/pattern: it (is too complex|cannot be enforced)"
    ):
        compiler.compile(JsonSchema(json.dumps({"properties": parts})))


@pytest.mark.parametrize(("kind", "step"), [("integer", 999_999_937), ("integer", 0.123456789), ("number", 100_003)])
def test_a_step_with_many_rests_is_refused_at_once_wherever_it_runs(kind: str, step: float) -> None:
    """Some below a million were enforced or not by how quick the machine was just then."""
    schema = json.dumps({"properties": {"a/b": {"type": kind, "multipleOf": step}}})
    with pytest.raises(ConstraintError, match=r"^schema at /properties/a~1b: multipleOf .* more than 100000"):
        normalise(schema)


@pytest.mark.parametrize(("keys", "parts"), [(20, "abc"), (10, "abcd"), (140, "ab"), (180, "ab")])
def test_products_of_any_of_are_refused_by_a_count_wherever_they_run(keys: int, parts: str) -> None:
    """All pairs of 8,000 ways were compared for five seconds, so that time ended it: at one there, later elsewhere."""
    schema = {"allOf": [{"anyOf": [{"required": [f"{x}{i}"]} for i in range(keys)]} for x in parts]}
    began = time.thread_time()
    with pytest.raises(ConstraintError, match=r"^schema at its root: it(s combinations are| has more than 1000)"):
        normalise(json.dumps(schema))
    assert time.thread_time() - began < PROCESSOR_SECONDS / 2


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"pattern": "^a{3,900}b{20}$", "minLength": 2000}}, "/items/pattern"),
        ({"properties": {"a": {"minItems": 5000}, "b": {"enum": [1] * 300}}}, "/properties/a/minItems"),
        ({"anyOf": [{}, {"patternProperties": {"^b{70}{80}": {}, "a": {}}}]}, "/anyOf/1/patternProperties/^b{70}{80}"),
        ({"properties": {"oneOf": {"oneOf": [{}] * 201}}}, "/properties/oneOf/oneOf"),
        ({"properties": {f"p{i}": {"maximum": 10**9} for i in range(300)}}, None),
    ],
)
def test_the_keyword_that_counts_furthest_is_found(schema: dict[str, Json], place: str | None) -> None:
    assert most_counted(schema) == place


def test_a_watch_tells_what_was_worked_on() -> None:
    watch = Watch(-1)
    watch.place = "/items"
    with pytest.raises(TookTooLong) as raised:
        watch.check()
    asked = request_for(JsonSchema("{}"), b"a")
    assert raised.value.place == "/items"
    with pytest.raises(ConstraintError, match=r"^schema at /items: it is too complex to compile within 2 s"):
        raise too_complex(JsonSchema("{}"), 2, raised.value)
    with pytest.raises(TookTooLong) as raised:
        read_answer(answer(asked, -1))
    assert raised.value.place is None  # the whole schema


def test_a_fault_of_compiling_is_told_as_such_and_not_as_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise IndexError("of a list")

    monkeypatch.setattr(sources, "source_of", broken)
    body = answer(request_for(Grammar('start: "a"'), b"a"), 1)
    with pytest.raises(RuntimeError, match=r"^niwaki failed where it compiled: IndexError: of a list") as raised:
        read_answer(body)
    assert "in broken" in raised.value.__notes__[0]


def test_a_watch_counts_this_thread_s_processor_time_and_not_the_clock() -> None:
    watch = Watch(0.05)
    time.sleep(0.1)
    for _ in range(3):
        watch.check()
    watch.expect(0.02)
    with pytest.raises(TookTooLong):
        watch.expect(0.06)

    def work() -> None:
        while True:
            watch.check()

    began = time.thread_time()
    with pytest.raises(TookTooLong):
        work()
    assert time.thread_time() - began < PROCESSOR_SECONDS


def test_a_process_that_nobody_asks_learns_what_formats_mean() -> None:
    text_terminal.cache_clear()
    learn({"format": "date-time"})
    known = text_terminal.cache_info()
    assert text_terminal(FORMAT_PATTERNS["date-time"], 0, None)
    assert text_terminal.cache_info().misses == known.misses
