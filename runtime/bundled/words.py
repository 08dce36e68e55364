"""Names and values: made of syllables, so that training and test never share one (`held` picks the side)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl st tr sh ch th".split()
NUCLEI = "a e i o u ai io".split()
CODAS = "n r l s m t nd rk ck".split()

MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLORS = "red blue green yellow black white brown grey purple orange pink silver".split()
ANIMALS = "dog cat horse parrot rabbit goat hamster duck turtle pony".split()
FOODS = "soup pasta rice bread pizza salad cheese fish curry pancakes noodles apples plums cake".split()
SPORTS = "tennis football chess golf rugby hockey swimming running rowing boxing".split()
INSTRUMENTS = "piano violin guitar flute drums cello trumpet harp".split()
THINGS = "box bag car bike boat lamp chair hat coat phone book table cup key door tent".split()
LEVELS = ["senior", "junior", "lead", "chief", "deputy", "assistant", "head"]
AREAS = "data sales product finance marketing design software research quality support project legal security".split()
JOBS = "analyst engineer manager director designer officer consultant planner writer tester".split()
TRADES = (
    "nurse teacher baker lawyer plumber pilot chef farmer florist carpenter dentist architect accountant librarian "
    "electrician mechanic gardener translator photographer journalist"
).split()
SUFFIXES = [
    "Labs",
    "Systems",
    "Group",
    "Foods",
    "Inc",
    "Ltd",
    "GmbH",
    "Partners",
    "Logistics",
    "Media",
    "Bank",
    "Studio",
]
TLDS = ["com", "org", "net", "io", "co", "de", "eu", "example", "dev"]


def is_held_out(key: str, share: int = 5) -> bool:
    """Whether `key` belongs to the test side: one in `share`, by a checksum that no seed changes."""
    return zlib.crc32(key.encode()) % share == 0


def _syllables(held: bool, codas: list[str]) -> list[str]:
    found = {onset + nucleus + coda for onset in ONSETS for nucleus in NUCLEI for coda in codas}
    return sorted(syllable for syllable in found if is_held_out(syllable) == held)


OPEN = {held: _syllables(held, [""]) for held in (False, True)}
CLOSED = {held: _syllables(held, CODAS) for held in (False, True)}


class Words:
    """Seeded source of values. With `held`, names hold only syllables that training never sees."""

    def __init__(self, rng: random.Random, held: bool = False) -> None:
        self.rng = rng
        self.held = held
        self.open, self.closed = OPEN[held], CLOSED[held]

    def renew(self) -> None:
        """Three training samples in four share few syllables, so that copying must look at more than one."""
        self.open, self.closed = OPEN[self.held], CLOSED[self.held]
        if not self.held and self.chance(0.75):
            self.open = self.rng.sample(self.open, self.rng.randint(5, 40))
            self.closed = self.rng.sample(self.closed, self.rng.randint(6, 60))

    def pick(self, items: Sequence[T]) -> T:
        return self.rng.choice(items)

    def some(self, items: Sequence[T], low: int, high: int) -> list[T]:
        """Between `low` and `high` different items, in random order."""
        return self.rng.sample(list(items), min(len(items), self.rng.randint(low, high)))

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def syllables(self, low: int = 2, high: int = 3) -> str:
        if not self.held and self.chance(0.08):  # odd spellings, so that any letters can be copied
            return "".join(self.pick("abcdefghijklmnopqrstuvwxyzéöñü") for _ in range(self.rng.randint(2, 9)))
        pools = [self.open if self.chance(0.5) else self.closed for _ in range(self.rng.randint(low, high))]
        return "".join(self.pick(pool) for pool in pools)

    def word(self, low: int = 2, high: int = 3) -> str:
        made = self.syllables(low, high).capitalize()
        return self.word(low, high) if made in ("He", "She") else made

    def first(self) -> str:
        return self.word(1, 3) if self.chance(0.3) else self.word(2, 2)

    def name(self) -> str:
        middle = f" {self.pick('ABCDEFGHIJKLMNOPRSTVW')}." if self.chance(0.04) else ""
        last = self.word()
        if self.chance(0.04):
            last = f"{last}-{self.word(1, 2)}"
        return f"{self.first()}{middle} {last}"

    def city(self) -> str:
        kind = self.rng.random()
        if kind < 0.12:
            return f"{self.pick(['New', 'Port', 'San', 'East', 'Saint', 'Bad', 'North'])} {self.word()}"
        if kind < 0.35:
            return self.word(1, 2) + self.pick(["ville", "ton", "burg", "ford", "stad", "field", "mouth"])
        return self.word()

    def company(self) -> str:
        kind = self.rng.random()
        if kind < 0.15:
            return f"{self.word()} & {self.word()}"
        if kind < 0.65:
            return f"{self.word()} {self.pick(SUFFIXES)}"
        if kind < 0.72:
            return f"{self.word()} {self.word()} {self.pick(SUFFIXES)}"
        return self.word()

    def role(self) -> str:
        kind = self.rng.random()
        if kind < 0.3:
            return self.pick(TRADES)
        if kind < 0.4:
            return f"head of {self.pick(AREAS)}"
        if kind < 0.6:
            return f"{self.pick(LEVELS)} {self.pick(AREAS)} {self.pick(JOBS)}"
        return f"{self.pick(AREAS)} {self.pick(JOBS)}"

    def email(self, name: str = "", company: str = "") -> str:
        parts = (name or self.name()).replace(".", "").lower().split()
        first, last = parts[0], parts[-1]
        local = self.pick(
            [f"{first}.{last}", first, f"{first[0]}.{last}", f"{first}_{last}", f"{last}{self.rng.randint(1, 99)}"]
            + [f"{first[0]}{last}", f"{first}{self.rng.randint(1, 999)}", f"{first}-{last}"]
        )
        use = company and self.chance(0.6)
        domain = company.lower().split()[0] if use else self.syllables()
        if self.chance(0.15):
            domain += self.pick(["mail", "-" + self.syllables(1, 2), "." + self.syllables(1, 2)])
        return f"{local}@{domain}.{self.pick(TLDS)}"

    def digits(self, count: int) -> str:
        return "".join(self.pick("0123456789") for _ in range(count))

    def phone(self) -> str:
        digits = self.digits
        forms: list[Callable[[], str]] = [
            lambda: f"555-{digits(4)}",
            lambda: f"+{digits(2)} {digits(2)} {digits(4)} {digits(3)}",
            lambda: f"({digits(3)}) {digits(3)}-{digits(4)}",
            lambda: f"+1-{digits(3)}-{digits(3)}-{digits(4)}",
            lambda: f"0{digits(3)} {digits(6)}",
            lambda: f"{digits(3)}.{digits(3)}.{digits(4)}",
            lambda: f"{digits(3)}-{digits(3)}-{digits(4)}",
            lambda: f"+{digits(2)} {digits(3)} {digits(7)}",
            lambda: f"0{digits(2)} {digits(4)} {digits(4)}",
            lambda: f"0{digits(4)}/{digits(5)}",
        ]
        return self.pick(forms)()

    def date(self) -> str:
        day, month, year = self.rng.randint(1, 28), self.rng.randint(1, 12), self.rng.randint(1990, 2039)
        named = MONTHS[month - 1]
        return self.pick(
            [f"{year}-{month:02}-{day:02}", f"{day} {named} {year}", f"{named} {day}, {year}", f"{day}/{month}/{year}"]
            + [f"{day:02}.{month:02}.{year}", f"{named} {day}", f"{day} {named}", f"{named[:3]} {day}, {year}"]
            + [f"{year}/{month:02}/{day:02}", f"{day} {named[:3]} {year}", f"{month:02}/{day:02}/{year}"]
        )

    def age(self) -> int:
        return self.rng.randint(18, 89)


def filler(words: Words, sentences: int) -> str:
    """Sentences that hold nothing any task asks for."""
    return " ".join(_filler_sentence(words) for _ in range(sentences))


_NOUNS = (
    "wall roof garden street bridge window shelf carpet fence river hill path stone tree cloud wind rain floor "
    "corner kitchen hall station market engine wheel bottle paper curtain ladder"
).split()
_ADJECTIVES = "old new small large quiet dusty bright heavy narrow wooden cold warm empty broken plain tall".split()
_VERBS = "stood lay moved stayed leaned fell turned waited shook rested".split()
_PREPOSITIONS = "near behind under beside above along past".split()
_TIMES = [
    "in the morning",
    "all night",
    "for a while",
    "last week",
    "again",
    "after lunch",
    "since spring",
    "as before",
]


def _filler_sentence(words: Words) -> str:
    a, b, noun, other = words.pick(_ADJECTIVES), words.pick(_ADJECTIVES), words.pick(_NOUNS), words.pick(_NOUNS)
    where, when = words.pick(_PREPOSITIONS), words.pick(_TIMES)
    return words.pick(
        [
            f"The {a} {noun} {words.pick(_VERBS)} {where} the {other}.",
            f"The {noun} was {a} and the {other} was {b}.",
            f"Nobody looked at the {a} {noun} {when}.",
            f"There was a {a} {noun} {where} the {b} {other}.",
            f"It {words.pick(['rained', 'snowed', 'was cold', 'was quiet', 'got dark'])} {when}.",
            f"Some people talked about the {noun} {when}.",
            f"We cleaned the {a} {noun} {when}.",
            f"The {other} {where} the {noun} {words.pick(_VERBS)} {when}.",
        ]
    )
