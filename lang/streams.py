"""A state's text as it comes: iterators for threads and for coroutines, on one cursor that the executor moves."""

from __future__ import annotations

from collections.abc import Iterator

from niwaki.lang.executor import Cursor, Executor


def iterate(executor: Executor, name: str | None, *, outside: bool) -> Iterator[str]:
    """The text, or the text of a variable, in pieces; from the start, also when asked late.

    Raises:
        What `Executor.next_piece` raises.
    """
    cursor = Cursor(name, outside)
    while (piece := executor.next_piece(cursor)) is not None:
        if piece:
            yield piece
