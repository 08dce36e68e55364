"""The likeliest tokens of a text, as packed as they were read: of 20 for each token an object for each takes an engine,
and whoever brings them somewhere, longer than the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

from niwaki.runtime.api.text import TokenLogprob

TextOf = Callable[[int], str]


class Packed(NamedTuple):
    """Tokens, best first, with their log-probabilities: int32 and float64."""

    ids: bytes
    logprobs: bytes

    def named(self, text: TextOf) -> tuple[TokenLogprob, ...]:
        ids, logprobs = self.unpacked()
        return _named(ids, logprobs, text)

    def unpacked(self) -> tuple[list[int], list[float]]:
        return list(memoryview(self.ids).cast("i")), list(memoryview(self.logprobs).cast("d"))


NOTHING = Packed(b"", b"")


class Likeliest(Sequence[tuple[TokenLogprob, ...]]):
    """For each token of a text `width` of them. Made into objects where somebody looks; equal to a tuple of those."""

    __slots__ = ("_text", "packed", "width")

    def __init__(self, packed: Packed, width: int, text: TextOf) -> None:
        """`packed`: of all tokens, one behind the other. `text`: of a token."""
        self.packed = packed
        self.width = width
        self._text = text

    def rows(self) -> Iterator[tuple[list[int], list[float]]]:
        """The tokens of each place, and their log-probabilities."""
        ids, logprobs = self.packed.unpacked()
        for start in range(0, len(ids), self.width):
            yield ids[start : start + self.width], logprobs[start : start + self.width]

    def __len__(self) -> int:
        return len(self.packed.ids) // (4 * self.width)

    @overload
    def __getitem__(self, place: int) -> tuple[TokenLogprob, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[tuple[TokenLogprob, ...], ...]: ...

    def __getitem__(self, place: int | slice) -> tuple[TokenLogprob, ...] | tuple[tuple[TokenLogprob, ...], ...]:
        return tuple(self)[place]

    def __iter__(self) -> Iterator[tuple[TokenLogprob, ...]]:
        for ids, logprobs in self.rows():
            yield _named(ids, logprobs, self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[object, ...]], tuple[list[tuple[TokenLogprob, ...]]]]:
        """A copy, also one for another process, is a plain tuple: a tokenizer is not taken along."""
        return tuple, (list(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


def together(packed: Sequence[Packed], text: TextOf) -> Sequence[tuple[TokenLogprob, ...]]:
    """Those of a text, token by token."""
    width = len(packed[0].ids) // 4 if packed else 0
    if not width or any(len(one.ids) != 4 * width for one in packed):  # of one that heals a prompt nothing is known
        return tuple(one.named(text) for one in packed)
    ids, logprobs = zip(*packed, strict=True)
    return Likeliest(Packed(b"".join(ids), b"".join(logprobs)), width, text)


def _named(ids: Sequence[int], logprobs: Sequence[float], text: TextOf) -> tuple[TokenLogprob, ...]:
    return tuple([TokenLogprob(value, token_id, text(token_id)) for token_id, value in zip(ids, logprobs, strict=True)])
