"""A state's text as it comes: iterators for threads and for coroutines, on one cursor that the executor moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

from niwaki.lang.executor import Executor
from niwaki.lang.meta import PieceInfo
from niwaki.lang.partial import NOTHING, partial_value
from niwaki.lang.transcript import Cursor
from niwaki.lang.typed import as_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T_co = TypeVar("T_co", covariant=True)


def iterate(executor: Executor, name: str | None, *, outside: bool) -> Iterator[str]:
    """The text, or the text of a variable, in pieces; from the start, also when asked late.

    Raises:
        What `Executor.next_piece` raises.
    """
    cursor = Cursor(name, outside)
    while (piece := executor.next_piece(cursor)) is not None:
        if piece:
            yield piece


class AsyncStream(ABC, Generic[T_co]):
    """What the async iterators have in common. Between two steps they hold nothing, so one may just stop reading."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None:
        """For `contextlib.aclosing`. There is nothing to close."""


class AsyncPieces(AsyncStream[tuple[str, PieceInfo]]):
    """Pieces of text, each with what is known of its tokens."""

    def __init__(self, executor: Executor, name: str | None, *, outside: bool) -> None:
        self._executor = executor
        self._cursor = Cursor(name, outside)
        self._num_tokens = 0
        self._num_logprobs = 0

    async def __anext__(self) -> tuple[str, PieceInfo]:
        while (piece := await self._executor.next_piece_async(self._cursor)) is not None:
            if piece:
                return piece, self._meta_info()
        raise StopAsyncIteration

    def _meta_info(self) -> PieceInfo:
        deltas = self._executor.deltas_of(self._cursor)
        logprobs = [(t.logprob, t.token_id, t.text) for delta in deltas for t in delta.logprobs]
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._num_logprobs += len(logprobs)
        info: PieceInfo = {"completion_tokens": self._num_tokens}
        if self._num_logprobs:
            info["output_token_logprobs"] = logprobs
            info["output_token_logprobs_length"] = self._num_logprobs
        return info


class AsyncTexts(AsyncStream[str]):
    """The pieces alone."""

    def __init__(self, pieces: AsyncPieces) -> None:
        self._pieces = pieces

    async def __anext__(self) -> str:
        return (await anext(self._pieces))[0]


class ValueStream(AsyncStream[T_co]):
    """A variable's value as it fills, for `for` and for `async for`; the finished one comes last.

    With a `dtype` that one is held against it; those before are made by the type of the gen, and taken for T_co.
    """

    def __init__(self, executor: Executor, name: str, dtype: TypeForm[T_co] | None, *, outside: bool) -> None:
        self._executor = executor
        self._name = name
        self._dtype = dtype
        self._cursor = Cursor(name, outside)
        self._text = ""
        self._last: object = NOTHING
        self._is_done = False

    def __iter__(self) -> Iterator[T_co]:
        while (piece := self._executor.next_piece(self._cursor)) is not None:
            if self._grows_by(piece):
                yield cast("T_co", self._last)
        if self._ends_as(self._executor.variable(self._name, outside=self._cursor.outside)):
            yield cast("T_co", self._last)

    async def __anext__(self) -> T_co:
        while not self._is_done:
            piece = await self._executor.next_piece_async(self._cursor)
            if piece is None:
                self._is_done = True
                value = await self._executor.variable_async(self._name, outside=self._cursor.outside)
                has_news = self._ends_as(value)
            else:
                has_news = self._grows_by(piece)
            if has_news:
                return cast("T_co", self._last)
        raise StopAsyncIteration

    def _grows_by(self, piece: str) -> bool:
        self._text += piece
        span = self._cursor.span
        if not piece or span is None or not span.fills or self._cursor.stop == span.end:
            return False  # at its end the finished value follows at once
        value = partial_value(span.dtype, self._text)
        return value is not NOTHING and self._becomes(value)

    def _ends_as(self, value: object) -> bool:
        """The finished value comes last in any case, as only it is validated; a text that came whole is finished."""
        if self._dtype is not None:
            as_type(value, self._dtype, self._name)
        return self._becomes(value) or not isinstance(value, str)

    def _becomes(self, value: object) -> bool:
        is_news = type(value) is not type(self._last) or value != self._last
        self._last = value
        return is_news
