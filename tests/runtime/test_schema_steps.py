"""Multiples that the last digits of a number tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.grammar_source import source_of_schema
from niwaki.runtime.constraints.guidance import build, byte_tokenizer
from niwaki.runtime.constraints.schema.steps import as_engine_reads, no_multiple_regex, step_of, step_regex
from tests.runtime.test_schema_normal import VOCABULARY, drawn
from tests.toy_constraints import takes

STEPS = "0.01 0.25 0.5 2.5 5 10 100 1 0.1 0.05 12.5 0.001 50 25 0.125 2 4 0.2 1e-7 0.0025 20 1.25".split()


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("step", STEPS)
def test_just_the_multiples_match(step: str) -> None:
    found = step_of(Fraction(step))
    assert found is not None
    pattern = re.compile(step_regex(found))

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, 10**6), st.integers(0, found.decimals + 1), st.sampled_from([1, found.digits]))
    def check(number: int, decimals: int, factor: int) -> None:
        digits = str(number * factor).rjust(decimals + 1, "0")
        text = f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits
        is_multiple = (Fraction(text) / Fraction(step)).denominator == 1
        assert (pattern.fullmatch(text) is not None) == (is_multiple and decimals <= found.decimals), text

    check()


@pytest.mark.parametrize("steps", [(2,), (5,), (2, 5), (4,), (25,), (8, 125), (1000,), (4, 10, 250)])
def test_just_the_whole_numbers_match_that_are_no_multiples(steps: tuple[int, ...]) -> None:
    pattern = re.compile(no_multiple_regex(steps))
    numbers = [*range(-1200, 12_000), *range(10**20, 10**20 + 1100)]
    found = [number for number in numbers if pattern.fullmatch(str(number))]
    assert found == [number for number in numbers if all(number % step for step in steps)]
    assert not any(map(pattern.fullmatch, ("-0", "01", "-", "1.5", "", "1" * 309)))
    assert pattern.fullmatch("9" * 308)


@pytest.mark.parametrize("step", ["1e10", "1e100", "1e307", "5e200", "100", "0.01", "0.25", "1"])
def test_no_multiple_is_read_as_infinite_and_the_largest_are_taken(step: str) -> None:
    found = step_of(Fraction(step))
    assert found is not None
    pattern = re.compile(step_regex(found))
    assert pattern.fullmatch("9" * (308 - found.num_ends) + "0" * found.num_ends)
    for length in (309, 320, 400, 600):
        assert not pattern.fullmatch("1" + "0" * (length - 1)), length


@pytest.mark.parametrize("step", ["3", "0.07", "7", "60", "1.1", "1e-300", "1024", "1e308"])
def test_what_the_last_digits_do_not_tell_is_left_to_the_engine(step: str) -> None:
    assert step_of(Fraction(step)) is None


@pytest.mark.parametrize(
    "step", "0.07 0.007 0.0003 0.28 0.3 1.1 1.21 0.013 33.3 7 0.35 1.13 0.14 0.23 0.57 4.7".split()
)
def test_the_engine_takes_just_the_multiples_of_a_step_whose_double_is_not_exact(step: str) -> None:
    start = build(
        source_of_schema(JsonSchema(f'{{"type": "number", "multipleOf": {step}}}'), 10, b"abc").text, byte_tokenizer()
    )
    decimals, rng, seen = len(step.partition(".")[2]), Random(0), set()
    for _ in range(600):
        count = rng.randrange(10 ** rng.randrange(1, 12))
        number = Fraction(step) * count if rng.random() < 0.5 else Fraction(count, 10**decimals)
        digits = str(int(number * 10**decimals)).rjust(decimals + 1, "0")
        text = f"{digits[:-decimals]}.{digits[-decimals:]}".rstrip("0").rstrip(".") if decimals else digits
        place = start.deep_copy()
        is_taken = place.try_consume_tokens([*text.encode()]) == len(text) and place.is_accepting()
        assert is_taken == ((Fraction(text) / Fraction(step)).denominator == 1), text
        seen.add(is_taken)
    assert seen == {True, False}


def test_most_steps_that_the_engine_takes_for_others_are_common_multiples_of_some_that_it_reads() -> None:
    steps = [Fraction(number, 100) for number in range(1, 561)]
    read = {step: found for step in steps if step_of(step) is None and (found := as_engine_reads(step))}
    several = [step for step, found in read.items() if len(found) > 1]
    assert len(several) == 50
    rng = Random(0)
    for step in several:
        schema = JsonSchema(f'{{"type": "number", "multipleOf": {float(step)}}}')
        start = build(source_of_schema(schema, 10, b"abc").text, byte_tokenizer())
        for count in (1, 2, 3, 7, 10, 50, 99, 100, 1000, rng.randrange(10**9)):
            for number in (step * count, step * count + Fraction(rng.choice([-1, 1]), 100)):
                text = f"{number.numerator * 100 // number.denominator:03}"
                text = f"{text[:-2]}.{text[-2:]}".rstrip("0").rstrip(".")
                place = start.deep_copy()
                is_taken = place.try_consume_tokens([*text.encode()]) == len(text) and place.is_accepting()
                assert is_taken == ((number / step).denominator == 1), (step, text)


@pytest.mark.parametrize("step", ["0.47", "0.12345678901", "1e-300", "99999999977"])
def test_a_step_that_the_engine_takes_for_another_is_refused_with_its_place(step: str) -> None:
    with pytest.raises(ConstraintError, match=r"^schema at .*: multipleOf .* cannot be enforced exactly"):
        source_of_schema(
            JsonSchema(f'{{"properties": {{"a": {{"type": "number", "multipleOf": {step}}}}}}}'), 10, b"abc"
        )


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["integer", "number"]),
    low=st.integers(-16, 16),
    width=st.integers(0, 10),
    strict=st.tuples(st.booleans(), st.booleans()),
    step=st.sampled_from([4, 8, 12, 28]),
)
def test_a_multiple_is_asked_for_only_where_one_lies_between_the_bounds(
    compiler: ConstraintCompiler, kind: str, low: int, width: int, strict: tuple[bool, bool], step: int
) -> None:
    """All in quarters. Steps are whole: of 0.25 the engine takes 0.50 and not 0.5."""
    bounds = {
        "exclusiveMinimum" if strict[0] else "minimum": low / 4,
        "exclusiveMaximum" if strict[1] else "maximum": (low + width) / 4,
    }
    between = range(low + strict[0], low + width + 1 - strict[1])
    is_met = any(quarters % step == 0 and (kind == "number" or quarters % 4 == 0) for quarters in between)
    number = {"type": kind, "multipleOf": step / 4, **bounds}
    optional = compiler.compile(JsonSchema(json.dumps({"type": "object", "properties": {"a": number}}))).matcher()
    assert takes(optional, "{}")
    if is_met:
        text = drawn(compiler.compile(JsonSchema(json.dumps(number))).matcher(), Random(0), 12)
        assert takes(optional, f'{{"a":{text}}}')
        return
    assert not takes(optional, '{"a":0}')
    with pytest.raises(ConstraintError, match="admits no text"):
        compiler.compile(JsonSchema(json.dumps(number)))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    step=st.sampled_from([25, 50, 75, 125, 100, 10, 1, 4, 20, 12, 250]),
    count=st.integers(-400, 400),
    beside=st.integers(-3, 3),
)
def test_a_multiple_is_written_with_as_many_decimals_as_it_has(
    compiler: ConstraintCompiler, step: int, count: int, beside: int
) -> None:
    """All in hundredths."""
    matcher = compiler.compile(JsonSchema(json.dumps({"type": "number", "multipleOf": step / 100}))).matcher()
    hundredths = count * step + beside
    number = hundredths / 100
    text = json.dumps(int(number) if number.is_integer() else number)
    assert takes(matcher, text) == (hundredths % step == 0), (text, step)
