"""Types to schemas to masked random text, read back by the type's own validator; counts what it does not take.

    python tests/benchmarks/draws.py --draws 10000

Text is drawn uniformly from what the mask allows, which walks into corners that no model would.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import ipaddress
import random
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, NotRequired

import numpy as np
import pydantic
from pydantic import Field
from typing_extensions import TypedDict  # before Python 3.12 Pydantic takes no other

from niwaki.lang.types import ValueType, value_type
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Vocabulary

WORDS = [
    b'{"',
    b'":',
    b'","',
    b'"}',
    b"true",
    b"null",
    b"12",
    b'"]',
    b"]}",
    b"-0",
    b"T0",
    b"\\u00",
    "é".encode(),
    b"a b",
]
END = 256 + len(WORDS)
SPARE = (0, 3, 12, 40)  # tokens that a text may be longer than the shortest
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), *WORDS, None], {END})


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Pet(pydantic.BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=8)]
    kind: Kind
    age: Annotated[int, Field(ge=0, le=30)] | None = None


class Visit(pydantic.BaseModel):
    day: datetime.date
    at: datetime.time
    until: datetime.datetime
    weight: Annotated[float, Field(gt=0, lt=90)]
    pets: Annotated[list[Pet], Field(min_length=1, max_length=2)]
    notes: dict[str, int]


class Cash(pydantic.BaseModel):
    way: Literal["cash"]
    cents: Annotated[int, Field(multiple_of=5, ge=0)]


class Card(pydantic.BaseModel):
    way: Literal["card"]
    number: Annotated[str, Field(pattern=r"^(?:\d{4}-){3}\d{4}$")]
    holder: Annotated[str, Field(pattern=r"[A-Z]{2}$", max_length=12)]


class Bill(pydantic.BaseModel):
    paid: Annotated[Cash | Card, Field(discriminator="way")]
    id: uuid.UUID
    lines: list[tuple[str, int]]


class Folder(pydantic.BaseModel):
    name: str
    inside: list[Folder] = []


@dataclass
class Point:
    x: float
    y: float
    tag: str | None = None


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    size: Annotated[int, Field(lt=100)]
    colours: Annotated[set[Literal["red", "green", "blue"]], Field(min_length=1)]


class Spot(NamedTuple):
    name: str
    at: tuple[float, float]


class Options(TypedDict):
    depth: Annotated[int, Field(gt=-5, lt=5)]
    note: NotRequired[str]


class Shop(pydantic.BaseModel):
    site: pydantic.HttpUrl
    wait: datetime.timedelta
    price: Annotated[decimal.Decimal, Field(ge=0)]
    key: pydantic.UUID4
    host: ipaddress.IPv4Address
    tags: Annotated[frozenset[Annotated[int, Field(ge=0, le=4)]], Field(max_length=3)]


TYPES: Sequence[object] = (
    int,
    float,
    bool,
    str,
    Literal["yes", "no", 3],
    Kind,
    list[Spot],
    Options,
    Shop,
    datetime.timedelta,
    Annotated[list[Annotated[str, Field(pattern="^[a-f]+$")]], Field(min_length=1, max_length=3)],
    Pet,
    Visit,
    Bill,
    Folder,
    Point,
    Settings,
    list[Kind],
    dict[str, Point],
    int | str,
    bool | None,
)


def drawn(compiled: CompiledConstraint, rng: random.Random, spare: int) -> str | None:
    """A text of the constraint, each token drawn from its mask; at most `spare` tokens longer than the shortest. None
    where it was not complete by then."""
    matcher = compiled.matcher()
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    text = b""
    for remaining in range(matcher.distance + 1 + spare, 0, -1):
        matcher.fill_mask_within(row, remaining)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        token = next(token for token in rng.sample(allowed, len(allowed)) if matcher.admits(token, remaining))
        matcher.accept(token)
        if token == END:
            break
        text += VOCABULARY.token_bytes[token] or b""
    return text.decode() if matcher.can_end else None


def fault(kind: ValueType, compiled: CompiledConstraint, rng: random.Random, spare: int) -> tuple[str, str] | None:
    """A text that was drawn for the type, and why it does not take it; None where it does."""
    text = drawn(compiled, rng, spare)
    if text is None:
        return "", "not complete within its tokens"
    for stop in kind.stop:  # cut off by whoever generates
        text = text.split(stop, 1)[0]
    try:
        kind.parse(text)
    except Exception as error:  # whatever the validator raises is a fault of ours
        return text, str(error).splitlines()[0]
    return None


def faults(draws: int, seed: int, types: Sequence[object] = TYPES) -> Iterator[tuple[str, str, str]]:
    """The texts that their types do not take, or that did not end: (type, text, why)."""
    rng = random.Random(seed)
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    kinds: list[ValueType] = [value_type(dtype) for dtype in types]
    try:
        compiled = [compiler.compile(kind.constraint) for kind in kinds]
        for index in range(draws):
            which = index % len(kinds)
            found = fault(kinds[which], compiled[which], rng, rng.choice(SPARE))
            if found is not None:
                yield kinds[which].name, *found
    finally:
        compiler.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = list(faults(given.draws, given.seed))
    for name, text, error in found[:20]:
        print(f"{name}: {text!r}: {error}")
    print(f"{given.draws} draws of {len(TYPES)} types, {len(found)} not taken by their validators, or not complete")
    for name, count in Counter(name for name, _, _ in found).items():
        print(f"  {count:6} {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
