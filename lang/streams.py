"""A state's text as it comes: iterators for threads and for coroutines, on one cursor that the executor moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Self, TypeVar

from niwaki.lang.executor import Cursor, Executor
from niwaki.lang.meta import MetaInfo

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


class AsyncStream(Generic[T_co]):
    """What the async iterators have in common. Between two steps they hold nothing, so one may just stop reading."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        raise NotImplementedError

    async def aclose(self) -> None:
        """For `contextlib.aclosing`. There is nothing to close."""


class AsyncPieces(AsyncStream[tuple[str, MetaInfo]]):
    """Pieces of text, each with what is known of its tokens."""

    def __init__(self, executor: Executor, name: str | None, *, outside: bool) -> None:
        self._executor = executor
        self._cursor = Cursor(name, outside)
        self._num_tokens = 0
        self._num_logprobs = 0

    async def __anext__(self) -> tuple[str, MetaInfo]:
        while (piece := await self._executor.next_piece_async(self._cursor)) is not None:
            if piece:
                return piece, self._meta_info()
        raise StopAsyncIteration

    def _meta_info(self) -> MetaInfo:
        """SGLang's keys: counts of everything so far, log-probabilities of this piece alone."""
        deltas = self._executor.deltas_of(self._cursor)
        logprobs = [(t.logprob, t.token_id, t.text) for delta in deltas for t in delta.logprobs]
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._num_logprobs += len(logprobs)
        info: MetaInfo = {"completion_tokens": self._num_tokens}
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
