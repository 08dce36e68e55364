"""Samples as training rows: token ids, loss weights and positions; rows are packed full of whole samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from niwaki.runtime.bundled.generator import stream, stretch
from niwaki.runtime.bundled.sample import Sample
from niwaki.runtime.bundled.tokenizer import JSON_RUNS, SPECIAL
from niwaki.runtime.bundled.words import Words

# Of prompt tokens one in a hundred is learnt, at half weight. More of them drown what is left to learn of the answers,
# whose losses are small by then: nobody can foresee a name.
PROMPT_SHARE, PROMPT_WEIGHT = 0.01, 0.5
SHORT_ANSWER = 9  # answers of fewer tokens weigh more, up to three times: a label is as much work as a name
NO_NOTE = -1
JUMP = 1700  # how far positions may jump between the parts of a sample

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, the weight of each token as a target, its position, and the token to have in mind there."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # from 0, with jumps
    notes: list[int] = field(default_factory=list)  # NO_NOTE where there is none


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Ints  # [rows, length]
    weights: Floats  # [rows, length]: weight of ids[:, i] as the target after ids[:, i - 1]
    positions: Ints  # [rows, length]
    notes: Ints  # [rows, length]


class Encoder:
    """Turns samples into rows; seeded choices of jumps and of looser token boundaries."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.rng = rng
        self.tokenizer = tokenizer
        self.loose: dict[int, list[int]] = {}
        for run in JSON_RUNS:
            (whole,) = self.encode(run)
            self.loose[whole] = [self.encode(character)[0] for character in run]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, sample: Sample, jump: bool, loose: bool) -> Row:
        """`jump`: positions leap at the gaps. `loose`: JSON punctuation one character a token (constraints do that)."""
        made = Row()
        gaps = sum(bool(span.gap) for span in sample.spans)
        position = 0
        for span in sample.spans:
            if jump and span.gap and self.rng.random() < 1.2 / gaps:
                position += self.rng.randint(1, JUMP)
            ids = self.encode(span.text)
            if loose:
                ids = [piece for token in ids for piece in self.loose.get(token, [token])]
            made.ids.extend(ids)
            made.notes.extend([self.encode(span.note)[0] if span.note else NO_NOTE] * len(ids))
            made.positions.extend(range(position, position + len(ids)))
            position += len(ids)
            if span.answer:
                made.weights.extend([max(1.0, min(3.0, SHORT_ANSWER / len(ids)))] * len(ids))
            else:
                made.weights.extend(PROMPT_WEIGHT if self.rng.random() < PROMPT_SHARE else 0.0 for _ in ids)
        made.weights[0] = 0.0  # nobody can foresee where a document starts
        return made


def repeats(rng: random.Random, vocabulary: int, length: int) -> Row:
    """Random spans of tokens, each said again some time later: what copying heads learn from.

    Half of the rows draw from few tokens, so that where to go on is told only by several tokens together.
    """
    alphabet = list(range(len(SPECIAL), vocabulary))
    few = rng.random() < 0.5
    if few:
        alphabet = rng.sample(alphabet, rng.randint(8, 60))
    unknown = 3 if few else 1  # tokens of a repeated span before it can be told which it is
    ids: list[int] = []
    weights: list[float] = []
    positions: list[int] = []
    pool: list[list[int]] = []
    position = 0
    while len(ids) < length:
        if pool and rng.random() < 0.65:
            span = rng.choice(pool)
            start = rng.randrange(max(1, len(span) - 4))
            part = span[start : start + rng.randint(4, 24)]
            weight = ([0.0] * unknown + [1.0] * len(part))[: len(part)]
        else:
            part = [rng.choice(alphabet) for _ in range(rng.randint(4, 32))]
            pool.append(part)
            weight = [0.0] * len(part)
        if rng.random() < 0.1:
            position += rng.randint(1, JUMP // 4)
        ids += part
        weights += weight
        positions += range(position, position + len(part))
        position += len(part)
    return Row(ids[:length], weights[:length], positions[:length], [NO_NOTE] * length)


def belongings(rng: random.Random, vocabulary: int, length: int) -> Row:
    """Owners and what belongs to them, all random tokens, then belongings asked for in any order.

    What is noted at each is its owner: what looking back for the same token, and taking what is noted there, is learnt
    from, many times a row.
    """
    begins, asks, *alphabet = range(len(SPECIAL), vocabulary)
    made = Row()
    while len(made.ids) < length:
        tokens = rng.sample(alphabet, rng.choice([6, 12, 24, 48]))
        owner_of: dict[int, int] = {}
        while tokens:
            owner, *owned = (tokens.pop() for _ in range(min(len(tokens), rng.randint(2, 4))))
            owner_of |= dict.fromkeys(owned, owner)
            made.ids.extend([begins, owner, *owned])
            made.notes.extend([NO_NOTE] * 2 + [owner] * len(owned))
        for token in rng.sample(list(owner_of), len(owner_of)):
            made.ids.extend([asks, token])
            made.notes.extend([NO_NOTE, owner_of[token]])
    return Row(made.ids[:length], [0.0] * length, list(range(length)), made.notes[:length])


class Packer:
    """Fills rows of one length from a stream of samples, always with the longest that still fits."""

    def __init__(self, tokenizer: Tokenizer, seed: int, length: int, far: float = 0.0, pool: int = 96) -> None:
        self.rng = random.Random(seed)
        self.encoder = Encoder(tokenizer, self.rng)
        self.words = Words(self.rng)
        self.length = length
        self.far = far  # share of samples that get real filler, up to the row's length
        self.size = pool
        self.pool: list[Row] = []
        self.seed = seed
        self.source: Iterator[Sample] = iter(())
        self.mix: Mapping[str, float] | None = None

    def next_row(self, mix: Mapping[str, float]) -> Row:
        if mix != self.mix:
            self.mix, self.source = dict(mix), stream(self.rng.randrange(1 << 40), mix)
        while len(self.pool) < self.size:
            self._draw()
        made, room = Row(), self.length
        while room > 0:
            fitting = [row for row in self.pool if len(row.ids) <= room]
            if not fitting:
                break
            row = max(fitting, key=lambda row: len(row.ids)) if made.ids else self.rng.choice(fitting)
            self.pool = [other for other in self.pool if other is not row]
            offset = made.positions[-1] + 1 if made.positions else 0
            made.ids.extend(row.ids)
            made.weights.extend(row.weights)
            made.notes.extend(row.notes)
            made.positions.extend(offset + position for position in row.positions)
            room -= len(row.ids)
            self._draw()
        return made

    def _draw(self) -> None:
        while True:
            sample = next(self.source)
            kind = self.rng.random()
            if kind < self.far:
                sample = stretch(sample, self.words, self.rng.randint(4, max(5, self.length // 19)))
            elif kind < self.far + 0.12:
                sample = stretch(sample, self.words, self.rng.randint(1, 5))
            row = self.encoder.row(sample, jump=kind > 0.5, loose=self.rng.random() < 0.12)
            if len(row.ids) <= self.length:
                self.pool.append(row)
                return


def batch(rows: list[Row], length: int) -> Batch:
    """Rows side by side, padded with token 0 at weight 0."""
    ids = np.zeros((len(rows), length), np.int64)
    weights = np.zeros((len(rows), length), np.float32)
    positions = np.zeros((len(rows), length), np.int64)
    notes = np.full((len(rows), length), NO_NOTE, np.int64)
    for index, row in enumerate(rows):
        count = len(row.ids)
        ids[index, :count] = row.ids
        weights[index, :count] = row.weights
        positions[index, :count] = row.positions
        notes[index, :count] = row.notes
    return Batch(ids, weights, positions, notes)
