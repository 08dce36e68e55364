"""One request's generations on their way from the engine's thread to the event loop, in order, and cancelled as one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial

import msgspec

from niwaki.runtime.api import Cancelled, Delta, EngineStopped, Generation, Output
from niwaki.runtime.link.wake import wake
from niwaki.runtime.server.beginning import Beginning
from niwaki.runtime.server.metrics import Metrics


class Piece(msgspec.Struct, frozen=True, gc=False):
    """More text of the generation at `index`."""

    index: int
    delta: Delta


class Ended(msgspec.Struct, frozen=True):
    """The generation at `index` is done; `outputs` are all of a generation that has more than one."""

    index: int
    output: Output
    outputs: tuple[Output, ...]


class Failed(msgspec.Struct, frozen=True):
    """The generation at `index` failed, and with it the request."""

    index: int
    error: BaseException


class Aborted(msgspec.Struct, frozen=True):
    """Somebody asked for the end of the generations at `places`; what has come of them is all that there is."""

    places: tuple[int, ...]


Event = Piece | Ended | Failed | Aborted


class Feed:
    """The events of `size` generations. Made and read on the event loop; `add` and the engine's callbacks run anywhere.

    `close` cancels what still runs, also generations that are added later: a client may be gone before its prompt is
    tokenized.
    """

    def __init__(self, size: int, metrics: Metrics, *, streams: bool | None = True) -> None:
        """Without `streams` there are no pieces: each costs something, read or not. None: they are counted, and nobody
        waits for them."""
        self.size = size
        self._metrics = metrics
        self._streams = streams is not False
        self._reads = bool(streams)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()  # the loop's
        self._reader: asyncio.Future[None] | None = None  # waits; used on the loop only
        self._events: deque[Event] = deque()  # all but pieces, which their generations keep
        self._write: Callable[[Sequence[Piece]], bool] | None = None  # used on the loop only, as are the next two
        self._num_taken = [0] * size  # of each generation's pieces
        self._over: set[int] = set()  # of which nothing more is told
        self._is_told = False  # since the reader last looked: one wake-up serves all events until then
        self._beginning = Beginning()  # adds them
        self._lock = threading.Lock()  # the three fields below, and the two above that `listen` changes
        self._generations: list[Generation] = []
        self._aborted: set[int] = set()
        self._is_closed = False
        self._began = time.perf_counter()
        self._last_piece: dict[int, float] = {}
        self._num_ended = 0
        self.num_tokens = 0  # computed for it: generated ones as they come, a prompt's uncached ones at its end

    # -- the engine's side ------------------------------------------------------------------------------------------

    def add(self, generation: Generation) -> None:
        with self._lock:
            index = len(self._generations)
            self._generations.append(generation)
            is_closed, is_aborted = self._is_closed, index in self._aborted
            streams, reads = self._streams, self._reads
        if is_closed:
            self._metrics.aborted.inc()
            generation.cancel()
            return
        if streams:
            generation.watch(self._hear, reads=reads)
        generation.add_done_callback(partial(self._end, index, generation))
        if is_aborted:
            self._cancel((index,))

    def _hear(self) -> None:
        """There is something to take: told for every token, behind its being there."""
        if not self._is_told:
            self._is_told = True
            if threading.get_ident() == self._thread:  # nearly always: the loop reads what the engine says
                self._tell()
            else:
                wake(self._loop, self._tell)

    def _end(self, index: int, generation: Generation) -> None:
        error = generation.error()
        if error is not None:
            self._put(Failed(index, error))
        else:
            outputs = generation.result()
            self._put(Ended(index, outputs[0], outputs))

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._hear()

    # -- the event loop's side --------------------------------------------------------------------------------------

    async def begun(self, beginning: asyncio.Future[None]) -> None:
        """Wait for `beginning`, which adds all of them; not where all were aborted meanwhile, which `batches` tells.

        Raises: what it failed with, or what `interrupt` was given before it was done.
        """
        await self._beginning.wait(beginning)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """All events, those that arrived together at once; ends when every generation has ended or one has failed."""
        num_running = self.size
        while num_running:
            if not self._is_told:
                self._reader = self._loop.create_future()
                await self._reader
            self._is_told = False  # before looking: what comes behind that is told anew
            events = self._taken()
            now = time.perf_counter()
            for event in events:
                if isinstance(event, Piece):  # one for each token: the rest is rare
                    self._measure(event, now)
                elif num_running:
                    num_running = self._num_left(event, num_running, now)
            if events:
                yield events

    def _taken(self) -> list[Event]:
        """What is there: the end of a generation stands behind its pieces, so it is looked for before them."""
        ends = [self._events.popleft() for _ in range(len(self._events))]
        found: list[Event] = [*self._pieces()]
        for event in ends:
            if isinstance(event, Aborted):
                found.append(Aborted(tuple(place for place in event.places if place not in self._over)))
                self._over.update(event.places)
            elif isinstance(event, Ended | Failed) and event.index not in self._over:
                found.append(event)
                self._over.add(event.index)
        return found

    def _pieces(self) -> list[Piece]:
        """Those that are there and were not measured."""
        found: list[Piece] = []
        if self._streams:
            for index, generation in enumerate(self._generations):
                if index not in self._over:
                    found += [Piece(index, delta) for delta in generation.deltas_from(self._num_taken[index])]
        return found

    def lead(self, write: Callable[[Sequence[Piece]], bool]) -> None:
        """Give the pieces of one generation to `write` where they come, while the reader of `batches` waits: waking him
        took 4 us of a piece's 23. False: it takes none for now, and the reader gets them. Of several generations he
        gets all pieces: one wake-up serves them, and each would look for those of all."""
        if self.size == 1:
            self._write = write

    def _tell(self) -> None:
        reader = self._reader
        if reader is None or reader.done():
            return
        if self._write is None or self._events:
            reader.set_result(None)
            return
        self._is_told = False  # before looking, as for the reader
        pieces = self._pieces()
        try:
            is_written = self._write(pieces)
        except Exception as error:  # the reader's own fault, and nobody else's
            self._is_told = True
            reader.set_exception(error)
            return
        if is_written:
            now = time.perf_counter()
            for piece in pieces:
                self._measure(piece, now)
        else:
            self._is_told = True
            reader.set_result(None)

    async def outputs(self) -> list[Output]:
        """Wait for all of them. Raises what the first to fail failed with."""
        found: dict[int, Output] = {}
        async for events in self.batches():
            for event in events:
                match event:
                    case Ended(index, output):
                        found[index] = output
                    case Failed(_, error):
                        raise error
                    case Aborted():
                        raise Cancelled("the request was aborted")
        return [found[index] for index in range(self.size)]

    def listen(self) -> None:
        """Somebody waits for pieces from now on: of all that there are. Calling it twice is allowed."""
        with self._lock:
            if self._reads:
                return
            self._streams = self._reads = True
            generations = tuple(self._generations)
        for generation in generations:
            generation.watch(self._hear)

    def interrupt(self, reason: EngineStopped) -> None:
        """Tell the reader that the server ends, and stop the work."""
        self._put(Failed(min(set(range(self.size)) - self._over, default=0), reason))
        self._cancel()
        self._beginning.leave(reason)

    def abort(self, places: Iterable[int]) -> None:
        """Tell the reader that there will be no more of some generations, and stop them; one that is not there yet when
        it is added."""
        told = tuple(places)
        with self._lock:
            self._aborted.update(told)
        self._put(Aborted(told))
        self._cancel(told)
        if len(self._aborted) == self.size:
            self._beginning.leave()

    def close(self) -> None:
        """Stop what still runs. Calling it twice is allowed."""
        self._write = None  # it may hold this
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            num_left = len(self._generations) - self._num_ended  # what was refused before it began is none of them
        if not was_closed and num_left:
            self._metrics.aborted.inc(num_left)
        self._cancel()

    def _cancel(self, places: Sequence[int] | None = None) -> None:
        with self._lock:
            generations = tuple(self._generations)
        for place in range(len(generations)) if places is None else places:
            try:
                if place < len(generations):
                    generations[place].cancel()
            except EngineStopped:
                return  # nothing runs any more

    def _measure(self, piece: Piece, now: float) -> None:
        before = self._last_piece.get(piece.index)
        if before is None:
            self._metrics.first_piece.observe(now - self._began)
        else:
            self._metrics.between_pieces.observe(now - before)
        self._last_piece[piece.index] = now
        self._num_taken[piece.index] += 1
        self.num_tokens += len(piece.delta.token_ids)

    def _num_left(self, event: Ended | Failed | Aborted, num_running: int, now: float) -> int:
        """How many generations still run behind the end of one; it is measured."""
        match event:
            case Ended(_, output, outputs):
                self._num_ended += 1
                self._metrics.whole.observe(now - self._began)
                self._metrics.queued.observe(output.queued_seconds)
                self.num_tokens += output.prompt_tokens - output.cached_tokens
                self.num_tokens += sum(one.completion_tokens for one in outputs)
                if self._streams:  # pieces, which were counted, are told of the first output only
                    self.num_tokens -= output.completion_tokens
                else:
                    self._metrics.first_piece.observe(output.first_seconds)
                return num_running - 1
            case Aborted(places):
                return num_running - len(places)
            case Failed(_, error):
                self._num_ended += num_running  # the others of the request fail with it
                self._metrics.failed.labels(type(error).__name__).inc(num_running)
                return 0
