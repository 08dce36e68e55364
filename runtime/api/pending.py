"""Waiting for a result: one class for every backend, read by waiting or by callback."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import ClassVar, Generic, TypeVar, TypeVarTuple

from niwaki.runtime.api.errors import TimedOut
from niwaki.runtime.api.text import Delta, Output

log = logging.getLogger("niwaki")


T = TypeVar("T")
Given = TypeVarTuple("Given")


class Pending(Generic[T]):
    """A result that will arrive. Written once by a backend (`succeed` or `fail`), read by anyone, any number of times.

    `add_done_callback` calls back at once when already done; otherwise on the thread that finishes it, so a
    callback must be short and must not wait.
    """

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()  # taken by itself for every token: a Condition's own `with` runs Python
        self._changed = threading.Condition(self._lock)
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self._cancel = cancel

    @property
    def is_done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value. Raises what the backend failed with, or TimedOut (the work goes on)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimedOut(f"no result within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # done without an error means that the value was set

    def error(self) -> BaseException | None:
        """What it failed with, or None (also while it still runs)."""
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(callback)
                return
        _guarded(callback)

    def cancel(self) -> None:
        """Ask the backend to stop. The result becomes `Cancelled` unless it was already there."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def succeed(self, value: T) -> None:
        """Backend side: set the value. Ignored when already done (a cancel may race with the last token)."""
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """Backend side: set the error. Ignored when already done."""
        self._end(None, error)

    def _end(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            self._cancel = None  # it holds what holds this: what is over goes at once, not when cycles are looked for
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            _guarded(callback)


def _guarded(callback: Callable[[*Given], None], *given: *Given) -> None:
    """Run a waiter's callback. Its fault is its own: it must never stop the backend that brings the result."""
    try:
        callback(*given)
    except Exception:
        log.exception("a callback on a result failed")


_reading_numbers = count(1)


class Generation(Pending[tuple[Output, ...]]):
    """A running generation: `result()` is a tuple of n outputs, `deltas()` streams the first of them."""

    # Another number after somebody has begun to read any: a backend need not look at all of them in every step.
    num_read: ClassVar[int] = 0

    def __init__(self, cancel: Callable[[], None] | None = None, listen: Callable[[bool], None] | None = None) -> None:
        """`listen` is called when somebody begins to take deltas, with whether he waits for each; and once more when
        the first begins who does, where that was another one."""
        super().__init__(cancel)
        self._listen = listen
        self._deltas: list[Delta] = []
        self._watchers: tuple[Callable[[], None], ...] = ()
        self._is_streamed = False
        self._is_read = False

    @property
    def is_streamed(self) -> bool:
        """Whether anybody has begun to take deltas. Until then a backend may send several as one."""
        return self._is_streamed

    @property
    def is_read(self) -> bool:
        """Whether anybody waits for each of them."""
        return self._is_read

    def push(self, delta: Delta) -> None:
        """Backend side: one more piece of text. One thread at a time does this."""
        # Done for every token of every stream, so without a lock: the delta is there before anybody is told of it, and
        # whoever wants to be told says so before looking for what is there.
        self._deltas.append(delta)
        for tell in self._watchers:
            tell()

    def watch(self, tell: Callable[[], None], *, reads: bool = True) -> None:
        """Call `tell` whenever there may be more for `deltas_from`. It must neither wait nor raise. Without `reads`
        nobody waits for what comes: it is counted, say."""
        self._add_watcher(tell)
        self.begin_reading(reads=reads)
        if self._deltas:
            tell()

    def _add_watcher(self, tell: Callable[[], None]) -> None:
        """Before `begin_reading`, after which `Streams` look for it."""
        with self._lock:
            if not self._done:
                self._watchers += (tell,)

    def _end(self, value: tuple[Output, ...] | None, error: BaseException | None) -> None:
        super()._end(value, error)
        self._watchers = ()  # all is there: who still looks need not be told, and they hold this
        self._listen = None

    def deltas_from(self, position: int) -> list[Delta]:
        """Those from `position` on that are there; waits for none."""
        return self._deltas[position:]

    def add_delta_callback(self, callback: Callable[[Delta], None], *, reads: bool = True) -> None:
        """Call back with every delta, those that already came included, in order. `reads`: as for `watch`."""
        self.watch(_Caller(self._deltas, callback), reads=reads)

    def deltas(self, timeout: float | None = None) -> Iterator[Delta]:
        """All deltas from the first on, also when called late. Raises what the generation failed with.

        `timeout` bounds the wait for each next delta.
        """
        if self._tell_waiting not in self._watchers:
            self._add_watcher(self._tell_waiting)
        self.begin_reading()
        position = 0
        while new := self._after(position, timeout):
            position += len(new)
            yield from new
        if self._error is not None:
            raise self._error

    def begin_reading(self, *, reads: bool = True) -> None:
        """Somebody takes deltas from now on; `reads`: as for `watch`."""
        with self._lock:
            is_news = not self._is_streamed or (reads and not self._is_read)
            self._is_streamed = True
            self._is_read |= reads
            listen = self._listen if is_news else None
        Generation.num_read = next(_reading_numbers)  # none twice: who writes late, too, is seen by who looks then
        if listen is not None:
            listen(reads)

    def _after(self, position: int, timeout: float | None) -> list[Delta]:
        """Wait for deltas from `position` on; empty when there will be none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done or len(self._deltas) > position, timeout):
                raise TimedOut(f"no text within {timeout} s")
            return self._deltas[position:]

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Streams:
    """Generations whose deltas come together, one of each, step after step: where they go and who is told is looked up
    once, and the latter again when anybody has begun to read any."""

    def __init__(self, generations: Iterable[Generation | None]) -> None:
        """None: what comes in this place is for nobody."""
        self._generations = tuple(generations)
        self._appends = [_to_nobody if one is None else one._deltas.append for one in self._generations]
        self._tells: list[Callable[[], None]] = []
        self._num_read = -1  # `Generation.num_read` as of those

    def push(self, deltas: Iterable[Delta]) -> Iterable[Callable[[], None]]:
        """Backend side: `Generation.push` for each of them. Gives what is to be called then, to tell whoever watches
        them."""
        for append, delta in zip(self._appends, deltas, strict=True):
            append(delta)
        num_read = Generation.num_read
        if self._num_read != num_read:  # looked at behind the above: who begins from now on sees what is there
            self._tells = [tell for one in self._generations if one is not None for tell in one._watchers]
            self._num_read = num_read
        return self._tells


def _to_nobody(delta: Delta) -> None:
    """For the deltas of a generation that is gone."""


class _Caller:
    """A watcher that calls back with each delta once, whichever thread tells it first."""

    def __init__(self, deltas: list[Delta], callback: Callable[[Delta], None]) -> None:
        self._deltas = deltas
        self._callback = callback
        self._position = 0
        self._lock = threading.RLock()

    def __call__(self) -> None:
        with self._lock:
            while self._position < len(self._deltas):
                self._position += 1
                _guarded(self._callback, self._deltas[self._position - 1])
