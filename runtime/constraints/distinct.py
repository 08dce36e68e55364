"""uniqueItems beside the mask: a matcher of llguidance's that follows the text, too, and allows no item twice. The same
for the keys of objects that ask for several unknown ones.

The grammar decides what an item is; this decides that it was not used, and that what is begun can still become one that
was not. Imports no NumPy: the process that compiles starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from llguidance import LLMatcher

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.distinct import DISTINCT, DISTINCT_KEYS, Layout, State
from niwaki.runtime.constraints.schema.document import identity

VALUE, STRING, ESCAPE, SCALAR, AFTER = range(5)  # what the next byte belongs to: VALUE where one may begin
BLANKS: Final = b" \n\r\t"
ENDS_SCALAR: Final = b",]} \n\r\t"
QUOTE, BACKSLASH, COMMA, COLON, OPEN_ARRAY, CLOSE_ARRAY, OPEN_OBJECT, CLOSE_OBJECT = b'"\\,:[]{}'
MAX_KNOWN: Final = 200  # of 16 KiB each
MAX_DIGITS: Final = 4000  # that Python reads as a number
CLOSED: Final = b'"]}'  # what an item ends with that is no scalar
LIKELY: Final = b'a"b,}]0123456789c'  # of these one may mostly follow
ALL_BYTES: Final = bytes(dict.fromkeys((*LIKELY, *range(256))))
# Tokens that may end an item otherwise than by the rest of a used one.
_STRUCTURAL: Final = re.compile(rb'\A[^"]*[,\]} \n\r\t]|".*"', re.DOTALL)
_ENDS_STRING: Final = re.compile(rb'"[^"]*[\]},]')
_ENDS_TWO: Final = re.compile(rb'".*,[ \n\r\t]*[^ \n\r\t]', re.DOTALL)
_NOT_ZERO: Final = re.compile(rb"[^\0]+")
_OPENS: Final = re.compile(rb"[\[{].*,", re.DOTALL)


T = TypeVar("T")
PlaceAt: TypeAlias = Callable[[int], "LLMatcher | None"]


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


class _Used(Generic[T]):
    """A set that stays as it is, of layers of which each is larger than all behind it: one with more shares most of
    them. A text keeps the set of each of its tokens, and 3,000 copies of a few thousand items took half a gigabyte."""

    __slots__ = ("_layers",)

    def __init__(self, layers: tuple[frozenset[T], ...] = ()) -> None:
        self._layers: tuple[frozenset[T], ...] = layers

    def __contains__(self, item: T) -> bool:
        return any(item in layer for layer in self._layers)

    def __iter__(self) -> Iterator[T]:
        for layer in self._layers:
            yield from layer

    def __bool__(self) -> bool:
        return bool(self._layers)

    def having(self, items: Iterable[T]) -> _Used[T]:
        layers, last = self._layers, frozenset(items)
        while layers and len(layers[-1]) <= 2 * len(last):
            layers, last = layers[:-1], layers[-1] | last
        return _Used((*layers, last)) if last else self


class _Open(NamedTuple):
    """An open object or array, and those around it. Of one that is distinct items must not repeat: of an object its
    keys, quotes included, so "item" means such a key there."""

    around: _Open | None
    state: State
    is_array: bool
    is_distinct: bool
    start: int  # where its item begins, -1 between items
    number: int  # of its item
    inner: State  # what its present value may be
    wants_key: bool
    used: _Used[bytes]  # its items
    values: _Used[str]  # and what they mean
    dead: _Used[bytes]  # beginnings of the next item that could only become used ones
    last: bytes = b""  # key
    is_alike: bool = False  # it was an unknown one


_NOTHING: Final = _Used[bytes]()
_NO_VALUES: Final = _Used[str]()


class Repeated(Exception):
    """An item would come twice. `place`: the byte of what was read at which that is certain."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Reader:
    """Where in its arrays and objects a text stands. Read by bytes; a copy costs nothing."""

    __slots__ = ("key_start", "layout", "length", "mode", "pieces", "top")

    def __init__(self, layout: Layout, pieces: Pieces) -> None:
        self.layout, self.pieces = layout, pieces
        self.top: _Open | None = None
        self.mode = VALUE
        self.length = 0
        self.key_start = -1

    def copy(self) -> _Reader:
        twin = _Reader.__new__(_Reader)
        twin.layout, twin.pieces, twin.top, twin.mode = self.layout, self.pieces, self.top, self.mode
        twin.length, twin.key_start = self.length, self.key_start
        return twin

    def distinct(self) -> list[_Open]:
        """Those open that allow no item twice."""
        found, top = [], self.top
        while top is not None:
            if top.is_distinct:
                found.append(top)
            top = top.around
        return found

    def begins_item(self, of: _Open) -> bool:
        """Whether an item of an open one may begin at once."""
        return self.mode == VALUE and (of.is_array or (of is self.top and of.wants_key))

    def read(self, text: bytes, place_at: PlaceAt) -> None:
        """Go on to the end of the whole text. place_at(n): the engine behind its first n bytes.

        Raises:
            Repeated: an item comes twice, or only such a one can.
        """
        for place in range(self.length, len(text)):
            byte = text[place]
            if self.mode == STRING:
                if byte == QUOTE:
                    self._end_string(text, place, place_at)
                elif byte == BACKSLASH:
                    self.mode = ESCAPE
            elif self.mode == ESCAPE:
                self.mode = STRING
            else:
                if self.mode == SCALAR and byte in ENDS_SCALAR:
                    self._end_value(text, place, place, place_at)
                if self.mode != SCALAR and byte not in BLANKS:
                    self._structure(text, place, byte, place_at)
            top = self.top
            while top is not None:
                if top.dead and top.start >= 0 and text[top.start : place + 1] in top.dead:
                    raise Repeated(place)
                top = top.around
        self.length = len(text)

    def _structure(self, text: bytes, place: int, byte: int, place_at: PlaceAt) -> None:
        top = self.top
        if byte == COMMA:
            assert top is not None
            if b"" in top.dead:
                raise Repeated(place)
            self.mode = VALUE
            self.top = top._replace(number=top.number + 1, wants_key=not top.is_array)
        elif byte == COLON:
            assert top is not None
            self.mode, self.top = VALUE, top._replace(wants_key=False)
        elif byte in (CLOSE_ARRAY, CLOSE_OBJECT):
            assert top is not None
            self.top = top.around
            self._end_value(text, place, place + 1, place_at)
        elif byte == QUOTE and top is not None and top.wants_key:
            self.mode, self.key_start = STRING, place
            if top.is_distinct:
                self.top = top._replace(start=place)
        else:
            self._begin_value(place)
            if byte == QUOTE:
                self.mode, self.key_start = STRING, -1
            elif byte in (OPEN_ARRAY, OPEN_OBJECT):
                state = self.layout.start if top is None else top.inner
                if top is not None and top.is_array:
                    state = self.layout.item(top.state, top.number)
                is_array = byte == OPEN_ARRAY
                is_distinct = self.layout.is_distinct(state, DISTINCT if is_array else DISTINCT_KEYS)
                self.top = _Open(
                    self.top, state, is_array, is_distinct, -1, 0, (), not is_array, _NOTHING, _NO_VALUES, _NOTHING
                )
                self.mode = VALUE
            else:
                self.mode = SCALAR

    def _begin_value(self, place: int) -> None:
        if self.top is not None and self.top.is_distinct and self.top.is_array:
            self.top = self.top._replace(start=place)

    def _end_string(self, text: bytes, place: int, place_at: PlaceAt) -> None:
        top = self.top
        if self.key_start >= 0 and top is not None:
            key = text[self.key_start : place + 1]
            name = json.loads(key)
            if top.is_distinct:
                top = self._with_key(top, key, name, place)
            self.top, self.key_start = top._replace(inner=self.layout.member(top.state, name)), -1
            self.mode = AFTER
        else:
            self._end_value(text, place, place + 1, place_at)

    def _end_value(self, text: bytes, place: int, end: int, place_at: PlaceAt) -> None:
        """A value ends before `end`, which the byte at `place` makes certain."""
        self.mode = AFTER
        top = self.top
        if top is None or not top.is_distinct:
            return
        if not top.is_array:
            self._end_pair(top, place_at(end))
            return
        item = text[top.start : end]
        value = _meaning(item)
        if value in top.values:
            raise Repeated(place)
        is_alike = self.layout.is_alike(top.state, top.number)
        new = {item, b"-0"} if value == "0" else {item}
        used = top.used.having(new)
        dead = _Dead(used, top.dead if is_alike else _NOTHING, self.pieces.byte_ids)
        behind = place_at(end)
        if behind is not None:
            dead.learn(sorted(new if is_alike else used), behind)
        self.top = top._replace(start=-1, used=used, values=top.values.having([value]), dead=dead.all())

    def _with_key(self, top: _Open, key: bytes, name: str, place: int) -> _Open:
        if name in top.values:
            raise Repeated(place)
        return top._replace(start=-1, used=top.used.having([key]), values=top.values.having([name]), last=key)

    def _end_pair(self, top: _Open, behind: LLMatcher | None) -> None:
        """Behind two unknown keys no known one comes: what could only become a used key still can."""
        is_unknown = len(top.state) == 1 and not self.layout.is_named(top.state, json.loads(top.last))
        is_alike = is_unknown and top.is_alike
        dead = _Dead(top.used, top.dead if is_alike else _NOTHING, self.pieces.byte_ids)
        if behind is not None:
            dead.learn([top.last] if is_alike else sorted(top.used), behind)
        self.top = top._replace(dead=dead.all(), is_alike=is_unknown)


def _meaning(item: bytes) -> str:
    """Equal for items that are equal."""
    try:
        return identity(json.loads(item, parse_int=_whole))
    except RecursionError:
        raise ConstraintError("an item is nested too deeply to be told from the others of its array") from None


def _whole(digits: str) -> int | str:
    """No text of a grammar holds the half of a pair, so no string means the same."""
    return int(digits) if len(digits) <= MAX_DIGITS else f"\ud800{digits}"


class _Dead:
    """Beginnings of the next item that could only become used ones; those of scalars are whole at any byte that ends
    them."""

    def __init__(self, used: _Used[bytes], known: _Used[bytes], byte_ids: Sequence[int]) -> None:
        self._used, self._known, self._byte_ids = used, known, byte_ids
        self._found: set[bytes] = set()

    def all(self) -> _Used[bytes]:
        return self._known.having(self._found)

    def learn(self, items: Sequence[bytes], place: LLMatcher) -> None:
        """Look at the beginnings of these used items, too. `place`: behind the last item; it is moved."""
        if not self._takes(place, b","):
            return
        blanks = place.compute_ff_bytes()
        self._takes(place, blanks[: len(blanks) - len(blanks.lstrip(BLANKS))])
        for item in items:
            here = place.deep_copy()
            if not self._takes(here, item):
                continue
            is_closed = item[-1:] in CLOSED
            if is_closed:
                self._found.add(item)
                here.rollback(1)
            for length in range(len(item) - is_closed, -1, -1):
                if not self._is_dead(here, item[:length]):
                    break
                self._found.add(item[:length])
                if length:
                    here.rollback(1)

    def _is_dead(self, here: LLMatcher, text: bytes) -> bool:
        forced = here.compute_ff_bytes()[:1]  # inside a constant one byte may follow, which saves asking for all
        is_whole = text in self._used
        for byte in forced or ALL_BYTES:
            longer = text + bytes([byte])
            is_used = (is_whole and byte in ENDS_SCALAR) or longer in self._found or longer in self._known
            if not is_used and here.validate_tokens([self._byte_ids[byte]]) == 1:
                return False
        return True

    def _takes(self, here: LLMatcher, text: bytes) -> bool:
        return here.try_consume_tokens([self._byte_ids[byte] for byte in text]) == len(text)


class DistinctMatcher:
    """As an `LLMatcher`, as far as it is asked."""

    def __init__(self, native: LLMatcher, layout: Layout, pieces: Pieces) -> None:
        self._native = native
        self._pieces = pieces
        self._text = b""
        self._readers = [_Reader(layout, pieces)]  # after each token; one more than tokens

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
        if self._native.validate_tokens([token_id]) == 1:
            try:
                after = self._after(text)
            except Repeated:
                return False
        else:
            after = self._readers[-1]
        if not self._native.consume_token(token_id):  # which remembers the error
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

    def _after(self, text: bytes) -> _Reader:
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
