"""Reading a state: every answer waits, on a thread or a coroutine, until nothing that was submitted can change it.

The half of an executor that readers see. It changes nothing of the state but to end it when its time is over.
"""

from __future__ import annotations

import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from niwaki.lang.meta import Outcome, Usage
from niwaki.lang.partial import NOTHING, partial_value
from niwaki.lang.run import Run
from niwaki.lang.transcript import Cursor, Span, Transcript
from niwaki.lang.waiting import Changes, Question, would_wait_for_itself
from niwaki.runtime.api import Delta, Message, ProgramError

T = TypeVar("T")


class Reading(ABC):
    """What readers look at, under one lock. Thread-safe. Reads raise the error that the state failed with.

    `outside`: the reader is not the program's body, so what the body has not submitted yet is waited for, too.
    """

    def __init__(self, run: Run, *, is_fork: bool) -> None:
        self.run = run
        self._changed = Changes()
        self._lock = self._changed.lock
        self._made = Transcript(run.program)
        self._error: BaseException | None = None
        self._traceback: types.TracebackType | None = None
        self._is_started = not is_fork  # a fork starts when its parent gets there
        self._is_body_done = is_fork
        self._ret_value: object = None
        # What has been submitted, and so is known to come.
        self._expected: dict[str, int] = {}
        self._num_joins = 0

    # -- what the executor answers for --------------------------------------------------------------------------------

    @abstractmethod
    def _is_idle(self) -> bool:
        """Has everything submitted run? With the lock held."""

    @abstractmethod
    def _is_in_forks(self, name: str) -> bool:
        """Does a fork that somebody holds set the variable, or will it? With the lock held."""

    @abstractmethod
    def _time_out(self) -> None:
        """End the state: the run's time is over."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the state: whoever waited for it does no more."""

    @abstractmethod
    def _start_streaming(self) -> None:
        """From now on text is wanted as it comes."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def sync(self, *, outside: bool = False) -> None:
        """Wait until everything submitted has run. `outside`: and until the program's body has ended.

        Raises:
            The error that the state failed with.
        """
        self._read(partial(self._is_settled, outside), lambda: None)

    async def sync_async(self, *, outside: bool = False) -> None:
        """`sync` without blocking the event loop."""
        await self._read_async(partial(self._is_settled, outside), lambda: None)

    def error(self, *, outside: bool = False) -> BaseException | None:
        """The error that the state failed with, or None when everything has run."""
        try:
            self.sync(outside=outside)
        except BaseException as error:
            if error is not self._error:
                raise  # the waiting itself was interrupted
        return self._error

    def text(self, *, outside: bool = False) -> str:
        return self._read(partial(self._is_settled, outside), lambda: self._made.text)

    def text_so_far(self) -> str:
        with self._lock:
            return self._made.text

    def messages(self, *, outside: bool = False) -> list[Message]:
        return self._read(partial(self._is_settled, outside), lambda: list(self._made.messages))

    def usage(self, *, outside: bool = False) -> Usage:
        return self._read(partial(self._is_settled, outside), lambda: self._made.usage)

    def shortened(self, *, outside: bool = False) -> tuple[str, ...]:
        return self._read(partial(self._is_settled, outside), lambda: tuple(self.run.shortened))

    def ret_value(self) -> object:
        return self._read(lambda: self._is_body_done, lambda: self._ret_value)

    def variable(self, name: str, *, outside: bool = False) -> object:
        """The variable's value, once every submitted step that sets it has run.

        Raises:
            UnknownVariable: nothing that was submitted sets it.
        """
        return self._read(partial(self._is_decided, name, outside), partial(self._variable, name))

    async def variable_async(self, name: str, *, outside: bool = False) -> object:
        """`variable` without blocking the event loop."""
        return await self._read_async(partial(self._is_decided, name, outside), partial(self._variable, name))

    def values_so_far(self) -> tuple[dict[str, object], dict[str, object]]:
        """The variables that are set, and what is known of those that are being generated. Never waits."""
        with self._lock:
            finished, texts = dict(self._made.variables), self._made.growing()
        growing = {name: partial_value(dtype, text) for name, (dtype, text) in texts.items()}
        return finished, {name: value for name, value in growing.items() if value is not NOTHING}

    def outcome(self, name: str, *, outside: bool = False) -> Outcome:
        return self._read(partial(self._is_decided, name, outside), partial(self._outcome, name))

    def has_variable(self, name: str, *, outside: bool = False) -> bool:
        """Is it set, or will a submitted step set it?"""
        return self._read(
            lambda: self._expected.get(name, 0) > 0 or name in self._made.variables or self._is_decided(name, outside),
            lambda: self._expected.get(name, 0) > 0 or name in self._made.variables,
        )

    # -- reading a text as it comes -----------------------------------------------------------------------------------

    def next_piece(self, cursor: Cursor) -> str | None:
        """Wait for text behind the cursor, and move it on. The piece may be empty; None: that was the whole text.

        Raises:
            UnknownVariable: nothing that was submitted sets the cursor's variable.
            The error that the state failed with, after the text that came before it.
        """
        self._start_streaming()
        with self._lock:
            self._wait_or_time_out(partial(self._has_news, cursor))
            return self._take_news(cursor)

    async def next_piece_async(self, cursor: Cursor) -> str | None:
        """`next_piece` without blocking the event loop."""
        self._start_streaming()
        return await self._when(partial(self._has_news, cursor), partial(self._take_news, cursor))

    def deltas_of(self, cursor: Cursor) -> tuple[Delta, ...]:
        """What the piece that the cursor took last was made of. Text that the program wrote has none."""
        with self._lock:
            return self._made.deltas_of(cursor)

    def _has_news(self, cursor: Cursor) -> bool:
        if self._error is not None or cursor.is_done:
            return True
        if cursor.name is None:
            return self._made.has_more(cursor) or self._is_settled(cursor.outside)
        if cursor.span is None:
            return cursor.name in self._made.spans or self._is_decided(cursor.name, cursor.outside)
        return self._made.has_more(cursor)

    def _take_news(self, cursor: Cursor) -> str | None:
        name = cursor.name
        if cursor.is_done:
            return None
        if cursor.span is None:
            if name is None:
                cursor.span = Span(0)
            elif name in self._made.spans:
                cursor.span = self._made.spans[name]
                cursor.stop = cursor.span.start
            else:
                self.raise_error()
                value = self._variable(name)  # set by the program, at once
                cursor.is_done = True
                return str(value)
        piece = self._made.move(cursor)
        if piece:
            return piece
        self.raise_error()
        cursor.is_done = self._is_settled(cursor.outside) if name is None else cursor.span.end is not None
        return None if cursor.is_done else ""

    # -- questions about the state, asked with the lock held ----------------------------------------------------------

    def _is_settled(self, outside: bool) -> bool:
        return self._is_idle() and (self._is_body_done or not outside)

    def _variable(self, name: str) -> object:
        return self._made.variable(name, *(() if name in self._made.variables else self._about(name)))

    def _outcome(self, name: str) -> Outcome:
        self._variable(name)
        return self._made.outcome(name)

    def _about(self, name: str) -> tuple[Sequence[str], str]:
        """For whoever is told that there is no such variable: the variables to come, and what to do."""
        remedy = "; its forks set it: join() them first" if self._is_in_forks(name) else ""
        return [other for other, count in self._expected.items() if count > 0], remedy

    def _is_decided(self, name: str, outside: bool) -> bool:
        """Can no submitted step change whether the variable is there, and what it is?"""
        if not self._is_started or self._expected.get(name, 0) > 0:
            return False
        if name in self._made.variables:
            return True
        return self._num_joins == 0 and (self._is_body_done or not outside)

    def raise_error(self) -> None:
        """Raise the error that the state failed with, if it has."""
        if self._error is not None:
            # With its first traceback: each raise would otherwise grow it.
            raise self._error.with_traceback(self._traceback)

    # -- waiting for the answer ---------------------------------------------------------------------------------------

    def _read(self, is_ready: Question, read: Callable[[], T]) -> T:
        """Wait until the answer is yes, and read. Both are called with the lock held.

        Raises:
            The error that the state failed with.
        """
        with self._lock:
            self._wait_or_time_out(lambda: self._error is not None or is_ready())
            self.raise_error()
            return read()

    async def _read_async(self, is_ready: Question, read: Callable[[], T]) -> T:
        """`_read` without blocking the event loop."""

        def read_or_raise() -> T:
            self.raise_error()
            return read()

        return await self._when(lambda: self._error is not None or is_ready(), read_or_raise)

    async def _when(self, is_ready: Question, read: Callable[[], T]) -> T:
        """Read as soon as the answer is yes, without blocking the event loop. A time-out is the clock's business."""
        while True:
            await self._changed.until(is_ready)
            with self._lock:
                if is_ready():
                    return read()

    def _wait_or_time_out(self, is_ready: Question) -> None:
        """Wait with the lock held."""
        if is_ready():
            return
        self.run.check_may_block()
        if would_wait_for_itself():
            raise ProgramError(
                f"a type's validator cannot wait for program {self.run.program}: it runs where results are told, so "
                "that none would come; check the value behind the gen"
            )
        while not self._wait(is_ready):
            if self.run.remaining() == 0.0:  # else it stood still meanwhile
                with self._changed.released():
                    self._time_out()
                return

    def _wait(self, is_ready: Question) -> bool:
        try:
            return self._changed.wait_for(is_ready, self.run.patience())
        except KeyboardInterrupt:
            if self.run.body_thread != threading.get_ident():  # else the body's run ends, unless the body goes on
                with self._changed.released():
                    self._interrupt()
            raise
