"""uniqueItems beside the mask: a matcher of llguidance's that follows the text, too, and allows no item twice. The same
for the keys of objects that ask for several unknown ones.

The grammar decides what an item is; this decides that it was not used, and that what is begun can still become one that
was not. Imports no NumPy: the process that compiles starts quickly.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from llguidance import LLMatcher

from niwaki.runtime.constraints.distinct_reader import ESCAPE, STRING, Reader, Repeated
from niwaki.runtime.constraints.schema.distinct import Layout

MAX_KNOWN: Final = 200  # of 16 KiB each
# Tokens that may end an item otherwise than by the rest of a used one.
_STRUCTURAL: Final = re.compile(rb'\A[^"]*[,\]} \n\r\t]|".*"', re.DOTALL)
_ENDS_STRING: Final = re.compile(rb'"[^"]*[\]},]')
_ENDS_TWO: Final = re.compile(rb'".*,[ \n\r\t]*[^ \n\r\t]', re.DOTALL)
_NOT_ZERO: Final = re.compile(rb"[^\0]+")
_OPENS: Final = re.compile(rb"[\[{].*,", re.DOTALL)


class Pieces:
    """What the tokens of a vocabulary write. `beginning_with(text)`: those that begin with it."""

    def __init__(
        self,
        texts: Sequence[bytes | None],
        byte_ids: Sequence[int],
        beginning_with: Callable[[bytes], Iterable[int]],
    ) -> None:
        self.texts, self.byte_ids, self.beginning_with = texts, byte_ids, beginning_with
        self._known: dict[bytes, int] = {}  # few: most are too long for any token
        self.structural, self.ends_string, self.ends_two, self.opens = map(
            self._set_with, (_STRUCTURAL, _ENDS_STRING, _ENDS_TWO, _OPENS)
        )

    def set_beginning_with(self, text: bytes) -> int:
        """Bit by bit, the tokens that begin with it."""
        known = self._known.get(text)
        if known is None:
            ids = list(self.beginning_with(text))
            known = _set_of(ids, 1 + max(ids) // 8) if ids else 0
            if ids and len(self._known) < MAX_KNOWN:
                self._known[text] = known
        return known

    def _set_with(self, pattern: re.Pattern[bytes]) -> int:
        found = (index for index, text in enumerate(self.texts) if text and pattern.search(text))
        return _set_of(found, 1 + len(self.texts) // 8)

    def written(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.texts[i] or b"" if i < len(self.texts) else b"" for i in ids)


def _set_of(ids: Iterable[int], num_bytes: int) -> int:
    """As an integer, bit by bit."""
    row = bytearray(num_bytes)
    for token_id in ids:
        row[token_id >> 3] |= 1 << (token_id & 7)
    return int.from_bytes(row, "little")


class DistinctMatcher:
    """As an `LLMatcher`, as far as it is asked."""

    def __init__(self, native: LLMatcher, layout: Layout, pieces: Pieces) -> None:
        self._native = native
        self._pieces = pieces
        self._text = b""
        self._readers = [Reader(layout, pieces.byte_ids)]  # after each token; one more than tokens

    def deep_copy(self) -> DistinctMatcher:
        twin = DistinctMatcher.__new__(DistinctMatcher)
        twin._native, twin._pieces = self._native.deep_copy(), self._pieces
        twin._text, twin._readers = self._text, self._readers.copy()
        return twin

    def rollback(self, count: int) -> bool:
        if not self._native.rollback(count):
            return False
        if count:
            del self._readers[-count:]
            self._text = self._text[: self._readers[-1].length]
        return True

    def is_accepting(self) -> bool:
        return self._native.is_accepting()

    def is_error(self) -> bool:
        return self._native.is_error()

    def get_error(self) -> str:
        return self._native.get_error()

    def compute_ff_bytes(self) -> bytes:
        """What the grammar forces. It leads to no used item: nothing is begun that could only become one."""
        return self._native.compute_ff_bytes()

    def validate_tokens(self, ids: list[int]) -> int:
        count = self._native.validate_tokens(ids)
        text = self._pieces.written(ids[:count])
        try:
            self._after(text)
        except Repeated as found:
            left = found.place - len(self._text)
            for index, token_id in enumerate(ids):
                left -= len(self._pieces.written([token_id]))
                if left < 0:
                    return index
        return count

    def try_consume_tokens(self, ids: list[int]) -> int:
        for index, token_id in enumerate(ids):
            if not self.consume_token(token_id):
                return index
        return len(ids)

    def consume_tokens(self, ids: list[int]) -> bool:
        return self.try_consume_tokens(ids) == len(ids)

    def consume_token(self, token_id: int) -> bool:
        text = self._pieces.written([token_id])
        if self._native.validate_tokens([token_id]) != 1:  # asked to consume it, it would take nothing more
            return False
        try:
            after = self._after(text)
        except Repeated:
            return False
        if not self._native.consume_token(token_id):
            return False
        self._text += text
        self._readers.append(after)
        return True

    def compute_bitmask(self) -> bytes:
        mask = self._native.compute_bitmask()
        repeated = self._repeated(mask)
        if not repeated:
            return mask
        kept = int.from_bytes(mask, "little") & ~repeated
        return kept.to_bytes(len(mask), "little")

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._native.unsafe_compute_mask_ptr(address, num_bytes)
        row = (ctypes.c_char * num_bytes).from_address(address)
        mask = row.raw
        repeated = self._repeated(mask)
        if repeated:
            row.raw = (int.from_bytes(mask, "little") & ~repeated).to_bytes(num_bytes, "little")

    def _repeated(self, mask: bytes) -> int:
        """Of the tokens of a mask those by which an item comes twice, or could only become such a one."""
        reader, pieces = self._readers[-1], self._pieces
        allowed = int.from_bytes(mask, "little")
        arrays = reader.distinct()
        found = 0
        for array in arrays:
            begun = self._text[array.start :] if array.start >= 0 else b""
            for text in array.dead:
                if text.startswith(begun) and (array.start >= 0 or reader.begins_item(array)):
                    found |= pieces.set_beginning_with(text[len(begun) :])
        if reader.mode in (STRING, ESCAPE):
            doubtful = pieces.ends_two | pieces.ends_string if arrays else pieces.opens
        else:
            doubtful = pieces.structural if arrays else pieces.opens
        doubtful &= allowed & ~found
        repeated = []
        for token_id in _bits(doubtful, len(mask)) if doubtful else ():
            try:
                self._after(pieces.texts[token_id] or b"")
            except Repeated:
                repeated.append(token_id)
        return (found & allowed) | (_set_of(repeated, len(mask)) if repeated else 0)

    def _after(self, text: bytes) -> Reader:
        """Where the text stands when it goes on like this. Raises Repeated."""
        reader = self._readers[-1].copy()
        if not text:
            return reader
        whole, byte_ids = self._text + text, self._pieces.byte_ids

        def place_at(end: int) -> LLMatcher | None:
            place = self._native.deep_copy()
            ids = [byte_ids[byte] for byte in whole[len(self._text) : end]]
            return place if place.try_consume_tokens(ids) == len(ids) else None

        reader.read(whole, place_at)
        return reader


def _bits(bits: int, num_bytes: int) -> Iterable[int]:
    for found in _NOT_ZERO.finditer(bits.to_bytes(num_bytes, "little")):
        for index, byte in enumerate(found[0], found.start()):
            yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)
