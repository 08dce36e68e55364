"""Schemas of numbers, drawn at random, both ways: what their masks can write satisfies them by its digits and as a
reader's double, and what satisfies them both ways is taken as Python writes it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, TypeAlias

import numpy as np
import pytest

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from tests.toy_constraints import takes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Number: TypeAlias = "int | float"
VOCABULARY: Final = Vocabulary([*(bytes([b]) for b in range(256)), None], {256})
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
STEPS: Final[list[Number]] = [1, 2, 3, 7, 10, 0.5, 0.25, 0.1, 0.01, 0.3, 2.5, 0.07, 1.1]
EDGES: Final = [0.0, 0.1, 1e-05, 3.0, 1e16, 1e22, 1e23, 5e-324, 0.0001, 0.999, 3.4028234663852886e38]
LONG: Final = 40  # digits of whole numbers beyond which a bound may be a little stricter
NUM_SEEDS: Final = 40


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


def some_number(rng: random.Random) -> Number:
    sign = rng.choice([1, 1, -1])
    match rng.randrange(8):
        case 0 | 1:
            return rng.randint(-20, 20)
        case 2:
            return round(rng.uniform(-5, 5), rng.randint(1, 3))
        case 3:
            return rng.uniform(-1e4, 1e4)
        case 4:
            return sign * rng.uniform(1, 10) * 10.0 ** rng.randint(-320, 300)
        case 5:
            return sign * rng.randint(0, int("9" * rng.randint(1, 45)))
        case 6:
            return sign * ((1 << rng.randint(50, 70)) + rng.randint(-3, 3))
        case _:
            return sign * rng.choice(EDGES)


def some_schema(rng: random.Random, depth: int = 1) -> dict[str, Json]:
    schema: dict[str, Json] = {"type": rng.choice(["number", "number", "integer"])}
    for key in BOUNDS:
        if rng.random() < 0.35:
            schema[key] = some_number(rng)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice(STEPS)
    if depth and rng.random() < 0.15:
        schema["not"] = {"enum": [rng.randint(-3, 3), some_number(rng)]}
    if depth and rng.random() < 0.15:
        schema["enum"] = [1, 0.5, *(some_number(rng) for _ in range(3))]
    if depth and rng.random() < 0.15:
        key = rng.choice(["allOf", "anyOf"])
        schema[key] = [some_schema(rng, 0), some_schema(rng, 0)]
    return schema


def is_valid(schema: Json, text: str) -> bool:
    """By its digits, and as read, where bounds and constants are read likewise. Multiples are those of the digits."""
    assert isinstance(schema, dict)
    read = json.loads(text)
    if isinstance(read, float) and math.isinf(read):
        return False
    digits = Fraction(text)
    tests = {"minimum": lambda a, b: a >= b, "maximum": lambda a, b: a <= b}
    tests |= {"exclusiveMinimum": lambda a, b: a > b, "exclusiveMaximum": lambda a, b: a < b}
    for key, value in schema.items():
        match key:
            case "type":
                holds = value == "number" or digits.denominator == 1
            case "multipleOf":
                holds = (digits / Fraction(repr(value))).denominator == 1
            case "allOf" | "anyOf":
                assert isinstance(value, list)
                holds = (all if key == "allOf" else any)(is_valid(part, text) for part in value)
            case "enum":
                assert isinstance(value, list)
                holds = digits in map(Fraction, map(repr, value)) and read in value
            case "not" if isinstance(value, dict) and "enum" not in value:
                holds = not is_valid(value, text)
            case "not":
                assert isinstance(value, dict)
                listed = value["enum"]
                assert isinstance(listed, list)
                holds = digits not in map(Fraction, map(repr, listed)) and read not in listed
            case _:
                holds = tests[key](digits, Fraction(repr(value))) and tests[key](read, value)
        if not holds:
            return False
    return True


def near(rng: random.Random, number: Number) -> list[Number]:
    """Numbers beside one, whole and not."""
    whole = int(number)
    found: list[Number] = [number, whole, whole - 1, whole + 1, whole + 0.5, number + rng.choice(STEPS), number * 2]
    for towards in (-math.inf, math.inf):
        beside = math.nextafter(float(number), towards)
        found += [beside, math.nextafter(beside, towards)]
    return [one for one in found if not isinstance(one, float) or math.isfinite(one)]


def numbers_in(schema: Json) -> list[Number]:
    if isinstance(schema, dict):
        return [number for value in schema.values() for number in numbers_in(value)]
    if isinstance(schema, list):
        return [number for value in schema for number in numbers_in(value)]
    return [schema] if isinstance(schema, int | float) and not isinstance(schema, bool) else []


def drawn(rng: random.Random, matcher: Matcher) -> str | None:
    """A text that the masks allow, ended where it may; None where it was not within 400 bytes."""
    place = matcher.clone()
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    text = bytearray()
    most = rng.choice([2, 6, 20])
    while len(text) < 400:
        if place.can_end and (place.is_done or len(text) >= most):
            return text.decode()
        place.fill_mask(row)
        allowed = [byte for byte in range(256) if row[byte >> 5] >> (byte & 31) & 1]
        byte = rng.choice(allowed)
        place.accept(byte)
        text.append(byte)
    return None


def is_canonical(text: str, schema: Json) -> bool:
    """Whether it must be taken: whole numbers are spelled as such where that is asked, see LONG, and between what the
    digits of a constant say and its double no number is looked for."""
    digits, asked = text.lstrip("-"), json.dumps(schema)
    if "not" in asked and abs(Fraction(text)) > 2**53:
        return False
    if digits.isdigit():
        return digits != "0" or text == "0" if len(digits) <= LONG else False
    has_steps_or_constants = any(word in asked for word in ("integer", "multipleOf", "enum"))
    is_whole = Fraction(text).denominator == 1
    if '"not": {"anyOf"' in asked and len(digits.partition("e")[0].lstrip("0.").replace(".", "")) > 15:
        return False  # of what must not be whole
    is_plain = "e" not in text or "multipleOf" not in asked
    return is_plain and not (is_whole and has_steps_or_constants) and 0 < abs(Fraction(text)) < 10**300


def faults_of(seed: int, compiler: ConstraintCompiler, steps: Sequence[Number] = ()) -> list[str]:
    """`steps`: numbers are no multiples of some of these."""
    rng = random.Random(seed)
    schema = some_schema(rng)
    if steps:
        schema["not"] = {"anyOf": [{"multipleOf": step} for step in rng.sample(steps, rng.randint(1, 2))]}
    known = numbers_in(schema)
    numbers = [one for number in known for one in near(rng, number)] + [some_number(rng) for _ in range(8)]
    texts = [json.dumps(number) for number in numbers]
    texts += [str(int(number)) for number in numbers if isinstance(number, float) and number.is_integer()]
    longer = ["9" * 20, "0" * 20 + "1", "4" + "9" * 25]
    texts += [f"{json.dumps(number)}{more}" for number in numbers if "." in json.dumps(number) for more in longer]
    texts = [text for text in texts if "e" not in text or text == json.dumps(float(text))]
    canonical = {json.dumps(number) for number in numbers} | {str(int(n)) for n in numbers if n == int(n)}
    valid = [text for text in texts if is_valid(schema, text)]
    try:
        matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    except ConstraintError as error:
        return [f"refused, yet {valid[0]} is in it: {error}"] if valid and "admits no text" in str(error) else []
    faults = []
    for text in dict.fromkeys(texts):
        if takes(matcher, text) and text not in valid:
            faults.append(f"{text} is taken")
    for text in dict.fromkeys(valid):
        if text in canonical and is_canonical(text, schema) and not takes(matcher, text):
            faults.append(f"{text} is refused")
    written = [found for _ in range(10) if (found := drawn(rng, matcher)) is not None]
    faults += [f"{text} is written" for text in written if not is_valid(schema, text)]
    return [f"{json.dumps(schema)}: {fault}" for fault in faults]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_numbers_agree_with_digits_and_doubles_both_ways(compiler: ConstraintCompiler, seed: int) -> None:
    assert faults_of(seed, compiler) == []


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_what_is_no_multiple_agrees_both_ways(compiler: ConstraintCompiler, seed: int) -> None:
    assert faults_of(seed, compiler, (2, 5, 4, 10, 25, 8, 40, 1000, 2.5, 0.5)) == []


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"type": "integer", "not": {"multipleOf": 2}}, [-7, -1, 1, 3, 1001, 10**40 + 1]),
        ({"type": "number", "not": {"multipleOf": 5}}, [-4, 1, 2.5, 0.1, 14, 1e-05]),
        (
            {"type": "integer", "multipleOf": 2, "not": {"anyOf": [{"multipleOf": 8}, {"multipleOf": 5}]}},
            [2, 4, -6, 12],
        ),
        ({"type": "integer", "minimum": 8, "maximum": 12, "not": {"multipleOf": 4}}, [9, 10, 11]),
        ({"type": "integer", "not": {"multipleOf": 2.5}}, [1, 4, 6]),
    ],
)
def test_no_multiple_of_a_step_that_last_digits_tell_is_written(
    compiler: ConstraintCompiler, schema: dict[str, Json], taken: list[Number]
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert all(takes(matcher, json.dumps(number)) for number in taken)
    numbers = [*range(-30, 130), 2.5, 10.5, 1000, 10**40]
    found = [number for number in numbers if takes(matcher, json.dumps(number))]
    assert found == [number for number in numbers if is_valid(schema, json.dumps(number))]
    ending = matcher.shortest_ending(3)
    assert ending is not None
    assert is_valid(schema, bytes(ending).decode())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "not": {"multipleOf": 3}}, "/not/multipleOf: what is no multiple cannot be enforced"),
        ({"type": "number", "not": {"multipleOf": 0.5}}, "/not/multipleOf: what is no multiple cannot be enforced"),
        ({"type": "integer", "multipleOf": 3, "not": {"multipleOf": 2}}, "multipleOf 3 cannot be enforced exactly"),
        ({"type": "integer", "multipleOf": 4, "not": {"multipleOf": 2}}, "admits no text"),
        ({"type": "integer", "minimum": 4, "maximum": 4, "not": {"multipleOf": 2}}, "admits no text"),
        ({"type": "integer", "not": {"multipleOf": 0.5}}, "admits no text"),
    ],
)
def test_what_no_last_digits_tell_is_refused(
    compiler: ConstraintCompiler, schema: dict[str, Json], reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler.compile(JsonSchema(json.dumps(schema)))


NO_THREES: dict[str, Json] = {"enum": [3, 4, 5, 7], "not": {"multipleOf": 3}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 3, "maxItems": 3, "uniqueItems": True, "items": NO_THREES},
        {
            "type": "array", "minItems": 3, "maxItems": 3, "uniqueItems": True,
            "items": {"type": "integer", "minimum": 1, "maximum": 7, "not": {"multipleOf": 3}},
        },
        {
            "type": "array", "minItems": 3, "maxItems": 3, "uniqueItems": True,
            "items": {"enum": [3, 6, 9]}, "contains": NO_THREES,
        },
        {"const": [3], "contains": NO_THREES},
        {"const": {"a": 3}, "properties": {"a": NO_THREES}},
    ],
)  # fmt: skip
def test_listed_numbers_of_which_more_is_asked_than_is_known_are_refused(
    compiler: ConstraintCompiler, schema: dict[str, Json]
) -> None:
    with pytest.raises(ConstraintError, match="/not/multipleOf: what is no multiple cannot be enforced"):
        compiler.compile(JsonSchema(json.dumps(schema)))


def test_what_is_not_whole_is_not_read_as_whole_either(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(JsonSchema('{"type": "number", "not": {"type": "integer"}}')).matcher()
    rng = random.Random(0)
    digits = [1, 2, 5, 9, 17, 60]
    texts = [
        "3" * 308 + ".5",
        "3" * 309 + ".5",
        "688." + "0" * 22 + "1",
        "0." + "9" * 17,
        "1e-400",
        "9.99e-1",
        "0.5",
        "5e-324",
        *(f"{whole}.{behind}" for whole in (2**51 + 1, 3 * 10**15) for behind in ("7", "75", "76", "79", "699")),
    ]
    for _ in range(3000):
        number = rng.choice(
            [rng.random(), rng.uniform(-1e3, 1e3), rng.uniform(0, 2**52), 10.0 ** rng.uniform(-320, 15)]
        )
        whole = str(rng.randrange(10 ** rng.choice(range(1, 18))))
        behind = rng.choice(["0", "9", "5", ""]) * rng.choice(range(18)) + str(rng.randrange(10 ** rng.choice(digits)))
        texts += [json.dumps(number), f"{whole}.{behind}".rstrip("0") + "1", f"0.{behind}9", f"{whole}.{behind}5"]
    for text in texts:
        is_whole = math.isinf(float(text)) or float(text).is_integer()
        if takes(matcher, text):
            assert not is_whole, text
        elif not is_whole and json.dumps(float(text)) == text:
            assert len(text.partition("e")[0].lstrip("-0.").replace(".", "")) > 15, text


def test_what_is_not_whole_is_between_its_bounds(compiler: ConstraintCompiler) -> None:
    rng = random.Random(0)
    num_taken = 0
    for _ in range(40):
        low = rng.choice([None, 0, 1, -3, 0.5, rng.uniform(-50, 50), rng.randrange(-(10**9), 10**9)])
        width = rng.choice([None, 1, 2, 0.75, rng.uniform(1, 1e6)])
        bounds: dict[str, Json] = {} if low is None else {rng.choice(BOUNDS[::2]): low}
        if width is not None:
            bounds[rng.choice(BOUNDS[1::2])] = (low or 0) + width
        if rng.random() < 0.3:
            bounds["not"] = {"anyOf": [{"type": "integer"}, {"enum": [0.5, 2, -1.25]}]}
        schema = {"type": "number", "not": {"type": "integer"}, **bounds}
        matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
        near = (low or 0) + (width or 1) * np.array([rng.uniform(-0.3, 1.3) for _ in range(40)])
        numbers = [*map(float, near), *(round(float(one), rng.randrange(4)) for one in near), 0.5, -1.25, 2.25]
        texts = [json.dumps(number) for number in numbers]
        texts += [f"{int(number)}.{rng.choice('09') * rng.randrange(18)}1" for number in numbers]
        for text in texts:
            is_valid_text = is_valid(bounds | {"not": {"enum": [0.5, -1.25] if "not" in bounds else []}}, text)
            is_meant = is_valid_text and not float(text).is_integer()
            if takes(matcher, text):
                num_taken += 1
                assert is_meant, (schema, text)
            elif is_meant and json.dumps(float(text)) == text:
                assert len(text.lstrip("-0.").replace(".", "")) > 15, (schema, text)
    assert num_taken > 500


def test_no_number_that_is_not_whole_is_one_whole_number(compiler: ConstraintCompiler) -> None:
    schema = {"anyOf": [{"type": "number", "not": {"type": "integer"}, "minimum": 3, "maximum": 3}, {"const": "a"}]}
    assert takes(compiler.compile(JsonSchema(json.dumps(schema))).matcher(), '"a"')
    with pytest.raises(ConstraintError, match="not whole"):
        compiler.compile(JsonSchema('{"type": "number", "not": {"type": "integer"}, "minimum": 1e300}'))
