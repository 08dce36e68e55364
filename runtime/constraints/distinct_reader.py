"""Where in its arrays and objects a text stands, and which items of them it has used: byte by byte, with what is begun
that could only become a used one. Knows no tokens but those of single bytes."""

from __future__ import annotations

import json
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
MAX_DIGITS: Final = 4000  # that Python reads as a number
CLOSED: Final = b'"]}'  # what an item ends with that is no scalar
LIKELY: Final = b'a"b,}]0123456789c'  # of these one may mostly follow
ALL_BYTES: Final = bytes(dict.fromkeys((*LIKELY, *range(256))))

T = TypeVar("T")
PlaceAt: TypeAlias = Callable[[int], "LLMatcher | None"]


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


class Open(NamedTuple):
    """An open object or array, and those around it. Of one that is distinct items must not repeat: of an object its
    keys, quotes included, so "item" means such a key there."""

    around: Open | None
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


class Reader:
    """Where in its arrays and objects a text stands. Read by bytes; a copy costs nothing."""

    __slots__ = ("byte_ids", "key_start", "layout", "length", "mode", "top")

    def __init__(self, layout: Layout, byte_ids: Sequence[int]) -> None:
        self.layout, self.byte_ids = layout, byte_ids
        self.top: Open | None = None
        self.mode = VALUE
        self.length = 0
        self.key_start = -1

    def copy(self) -> Reader:
        twin = Reader.__new__(Reader)
        twin.layout, twin.byte_ids, twin.top, twin.mode = self.layout, self.byte_ids, self.top, self.mode
        twin.length, twin.key_start = self.length, self.key_start
        return twin

    def distinct(self) -> list[Open]:
        """Those open that allow no item twice."""
        found, top = [], self.top
        while top is not None:
            if top.is_distinct:
                found.append(top)
            top = top.around
        return found

    def begins_item(self, of: Open) -> bool:
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
                self.top = Open(
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
        dead = _Dead(used, top.dead if is_alike else _NOTHING, self.byte_ids)
        behind = place_at(end)
        if behind is not None:
            dead.learn(sorted(new if is_alike else used), behind)
        self.top = top._replace(start=-1, used=used, values=top.values.having([value]), dead=dead.all())

    def _with_key(self, top: Open, key: bytes, name: str, place: int) -> Open:
        if name in top.values:
            raise Repeated(place)
        return top._replace(start=-1, used=top.used.having([key]), values=top.values.having([name]), last=key)

    def _end_pair(self, top: Open, behind: LLMatcher | None) -> None:
        """Behind two unknown keys no known one comes: what could only become a used key still can."""
        is_unknown = len(top.state) == 1 and not self.layout.is_named(top.state, json.loads(top.last))
        is_alike = is_unknown and top.is_alike
        dead = _Dead(top.used, top.dead if is_alike else _NOTHING, self.byte_ids)
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
