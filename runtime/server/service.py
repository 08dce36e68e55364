"""What stands behind every route: who may ask, how much is in flight, which threads prepare it, and how it all ends."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Protocol, TypeVar

from niwaki.runtime.api import (
    EngineStopped,
    Generation,
    RequestError,
    SamplingOptions,
    SamplingParams,
)
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.errors import ApiError, ServerEnds, log, overloaded
from niwaki.runtime.server.feed import Feed
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.rates import Rates
from niwaki.runtime.server.served import ServedEngine, ServedModel, Work

MAX_SEQUENCES = 256  # of one request: prompts times n
# Of a choice, so many texts to score count as one sequence: they give no token, but each is a request. 4,096 of them
# take 11 MB while they wait, and as one sequence 1,280 such calls were let in; now 40 are.
ROWS = 128
# Of the prompts of one request, where they are several: each takes 650 bytes on its way, those of 256 prompts of 4,000
# tokens with the 20 likeliest took 13 GB. One prompt may ask for all of its own.
MOST_PROMPT_LOGPROBS = 2**21
SERVED_ALIASES = ("", "default")  # model names that mean whatever is served

Result = TypeVar("Result")
Names = Sequence[tuple[str, range]]  # of parts of a request, by the places of its sequences
Part = tuple[Feed, range]

# Of glibc; other C libraries have none. A function of `CDLL` lets other threads run meanwhile.
_TRIM = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)

# Whose body is longer waits for others of its kind: four of 4 MiB, 5 s of tokenizing each, held everybody up for 13 s.
LONG_BODY = 256 * 2**10

# The digest of the key with which the request that runs now was made; empty where the server has no keys.
caller: ContextVar[bytes] = ContextVar("niwaki_caller", default=b"")
# How long the body of that request is.
body_bytes: ContextVar[int] = ContextVar("niwaki_body_bytes", default=0)


class InFlight(Protocol):
    """What a client waits for, as the service counts and ends it."""

    @property
    def size(self) -> int:
        """In sequences."""
        ...

    @property
    def num_tokens(self) -> int:
        """That were computed for it so far."""
        ...

    def interrupt(self, reason: EngineStopped) -> None:
        """Tell the client that the server ends."""
        ...

    def close(self) -> None:
        """Stop what still runs. Called when it is over, too."""
        ...


class Service:
    """One server's state. Its methods run on the event loop."""

    def __init__(self, config: ServerConfig, model: ServedModel, engine: ServedEngine) -> None:
        self.config = config
        self.model = model
        self.engine = engine
        self.metrics = Metrics(engine.usage)
        self.writing = asyncio.Lock()  # of answers that take long to write, a part at a time
        self.at_start: list[Callable[[], None]] = []  # what else begins with the service, on its event loop
        self.at_close: list[Callable[[], None]] = []  # what else ends with it
        self.started_at = int(time.time())
        self._secret = config.cache_secret or os.urandom(32)
        self._in_flight: dict[InFlight, bytes] = {}  # whose it is
        self._num_in_flight = 0  # in sequences
        self._named: dict[tuple[bytes, str], set[Part]] = {}  # (whose, its name) -> parts of requests
        self._names: dict[InFlight, Sequence[tuple[str, Part]]] = {}  # the same, by request
        self._rates = Rates(dict(config.key_limits), config.limits)
        self._is_draining = False
        self._must_hurry = False
        # Constraints compile for up to a second each: they must not keep others from being tokenized.
        self._preparing = ThreadPoolExecutor(4, thread_name_prefix="niwaki-prepare")
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="niwaki-constrain")
        self._preparing_long = ThreadPoolExecutor(1, thread_name_prefix="niwaki-prepare-long")
        # A database that does not answer holds its own threads alone.
        self._storing = ThreadPoolExecutor(4, thread_name_prefix="niwaki-store")
        # Bodies that take long to read, before they are counted: they wait for none that was.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="niwaki-read")

    # -- who asks ---------------------------------------------------------------------------------------------------

    def key_of(self, authorization: str | None) -> bytes:
        """The digest of the caller's key; empty where the server has no keys.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if not self.config.key_digests:
            return b""
        found = _bearer_digest(authorization)
        known = (*self.config.key_digests, *((self.config.admin_digest,) if self.config.admin_digest else ()))
        if found is None or not _is_one_of(found, known):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return found

    def check_admin(self, authorization: str | None) -> None:
        """Raises ApiError: 404 unless the caller holds the admin key, or nobody needs any key."""
        if not self.config.key_digests and self.config.admin_digest is None:
            return
        found = _bearer_digest(authorization)
        admin = self.config.admin_digest
        if admin is None or found is None or not _is_one_of(found, (admin,)):
            raise ApiError(404, "no such page", code="not_found")

    def namespace(self, key: bytes, salt: str | None) -> str:
        """Whose cache a request shares: the caller's, or one of the caller's several (`loop.fairness`). Keyed with a
        secret, so that no client can name another's."""
        owner = hmac.new(self._secret, key, hashlib.sha256).hexdigest() if key else ""
        if not salt:
            return owner
        named = bytes([len(key)]) + key + salt.encode()
        return f"{owner}/{hmac.new(self._secret, named, hashlib.sha256).hexdigest()}"

    @property
    def model_names(self) -> tuple[str, ...]:
        """That clients may ask the model by; the first is the one that answers have."""
        return self.config.model_names or (self.model.info.model,)

    def check_model(self, name: str | None) -> None:
        names = self.model_names
        if name is not None and name not in names and name not in SERVED_ALIASES:
            served = " or ".join(map(repr, names))
            raise ApiError(404, f"this server has the model {served} only", param="model", code="model_not_found")

    def start(self) -> None:
        for begin in self.at_start:
            begin()

    # -- what runs --------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.engine.is_alive and not self._is_draining

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def resolve(self, options: SamplingOptions) -> SamplingParams:
        return options.over(self.model.info.defaults).resolve()

    def check_room(self, size: int = 1) -> None:
        """Raises ApiError: 503 while draining, without an engine or with a full queue."""
        if self._is_draining:
            raise overloaded("the server is shutting down")
        if not self.engine.is_alive:
            raise overloaded("the engine is not running; it is started again, or the server's log says why not")
        limit = self.model.max_running + self.config.max_queued
        if self._in_flight and self.num_in_flight + size > limit:
            raise overloaded(f"{self.num_in_flight} sequences run or wait already; try again")

    def admit(self, size: int) -> None:
        """Count a request of the caller. Raises ApiError: as `check_room`; 429 when the caller asked too much, 400 for
        more than one request may ask."""
        if size > MAX_SEQUENCES:
            raise ApiError(400, f"{size} sequences in one request; at most {MAX_SEQUENCES}", param="n")
        self.check_room(size)
        self._rates.admit(caller.get())

    def check_rate(self, key: bytes) -> None:
        """Raises ApiError: 429 while `admit` refuses whoever has this key."""
        self._rates.check(key)

    def enter(self, one: InFlight) -> None:
        """Count it from now on; the caller must `finish` it."""
        key = caller.get()
        self._in_flight[one] = key
        self._rates.enter(key)
        self._count(one.size)

    async def begin(
        self,
        size: int,
        prepare: Callable[[], Sequence[Work]],
        *,
        compiles: bool,
        streams: bool | None = True,
        names: Names = (),
    ) -> Feed:
        """Start `size` sequences. `prepare` tokenizes and checks, on a thread; the caller must `finish` the feed.
        `streams`: what `must_stream` gives, or None for who may want pieces though nobody waits for them. `names`: by
        which `abort` finds them, from before that on; when all were aborted it may go on behind this.

        Raises:
            ApiError: as `admit`. NiwakiError: what `prepare` and the engine raise.
        """

        def start() -> Iterator[Generation]:
            works = prepare()
            _check_logprobs(works)
            for work in works:
                yield self.engine.start(
                    work.ids, work.params, work.namespace, logits_from=work.logits_from, streams=streams
                )

        return await self.begin_generations(size, start, compiles=compiles, streams=streams, names=names)

    def must_stream(self, is_read: bool) -> bool | None:
        """Whether pieces must come; None: they are counted alone. Who is held to tokens a minute pays for those of an
        answer that it leaves, too."""
        return None if not is_read and self._rates.counts_tokens(caller.get()) else is_read

    async def begin_generations(
        self,
        size: int,
        start: Callable[[], Iterable[Generation]],
        *,
        compiles: bool,
        streams: bool | None = True,
        names: Names = (),
    ) -> Feed:
        """As `begin`, for those who start their `size` generations themselves, on a thread."""
        self.admit(size)
        feed = Feed(size, self.metrics, streams=streams)
        self.enter(feed)
        self._name(feed, names)

        def add_all() -> None:
            for generation in start():
                feed.add(generation)

        try:
            await feed.begun(self._on_thread(add_all, self._compiling if compiles else self._preparing))
        except BaseException:
            self.finish(feed)
            raise
        return feed

    async def read(self, function: Callable[[], Result]) -> Result:
        """Read a body: on a thread where it is long, as 4 MiB of messages take half a second."""
        if body_bytes.get() <= LONG_BODY:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._reading, function)

    async def apart(self, function: Callable[[], Result]) -> Result:
        """Run something that takes a while on a thread."""
        return await self._on_thread(function, self._preparing)

    async def store(self, function: Callable[[], Result]) -> Result:
        """Ask a database."""
        return await asyncio.get_running_loop().run_in_executor(self._storing, function)

    def _on_thread(self, function: Callable[[], Result], usual: ThreadPoolExecutor) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        if body_bytes.get() <= LONG_BODY:
            return loop.run_in_executor(usual, function)
        return loop.run_in_executor(self._preparing_long, _and_tidy_up, function)

    def finish(self, one: InFlight) -> None:
        """The request is answered, or its client is gone: whatever still runs for it stops."""
        key = self._in_flight.pop(one, None)
        one.close()
        if key is not None:
            self._unname(one, key)
            self._rates.leave(key, one.num_tokens)
            self._count(-one.size)

    def _name(self, feed: Feed, names: Names) -> None:
        """Let `abort` find some of its generations under names of its caller."""
        if names:
            self._names[feed] = [(name, (feed, places)) for name, places in names]
            for name, part in self._names[feed]:
                self._named.setdefault((caller.get(), name), set()).add(part)

    def _unname(self, one: InFlight, key: bytes) -> None:
        for name, part in self._names.pop(one, ()):
            named = self._named[key, name]
            named.discard(part)
            if not named:
                del self._named[key, name]

    def abort(self, name: str | None) -> None:
        """End what the caller gave that name; None: all that has one. Others' are not touched."""
        key = caller.get()
        for (owner, known), parts in tuple(self._named.items()):
            if owner == key and name in (None, known):
                for feed, places in tuple(parts):
                    feed.abort(places)

    def _count(self, more: int) -> None:
        self._num_in_flight += more
        self.metrics.in_flight.set(self._num_in_flight)

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def refuse(self) -> None:
        """Take no new work from now on. May be called on any thread, and in a signal handler."""
        self._is_draining = True

    def hurry(self) -> None:
        """Let `drain` wait no longer. May be called on any thread."""
        self._must_hurry = True

    async def drain(self) -> None:
        """Refuse new work; wait for what runs, and tell what does not end in time."""
        self.refuse()
        deadline = time.monotonic() + self.config.drain_seconds
        while self._in_flight and time.monotonic() < deadline and not self._must_hurry:
            await asyncio.sleep(0.02)
        if not self._in_flight:
            return
        why = "the server is shutting down"
        if not self._must_hurry:
            why += f", and the {self.config.drain_seconds:g} s that it leaves to requests are over"
        log.warning("%d sequences were cut off: %s", self.num_in_flight, why)
        for one in tuple(self._in_flight):
            one.interrupt(ServerEnds(why))

    def close(self) -> None:
        for one in tuple(self._in_flight):
            self.finish(one)
        for end in self.at_close:
            end()
        for executor in (self._preparing, self._compiling, self._preparing_long, self._storing, self._reading):
            executor.shutdown(wait=False, cancel_futures=True)


def _check_logprobs(works: Sequence[Work]) -> None:
    """Raises RequestError: so many are asked for of prompts that telling them would take the server's memory."""
    told = [(len(work.ids) - work.logits_from, work.params) for work in works if work.logits_from is not None]
    count = sum(size * (1 + params.top_logprobs_num) for size, params in told)
    if len(told) > 1 and count > MOST_PROMPT_LOGPROBS:
        of = f"of several prompts at most {MOST_PROMPT_LOGPROBS}"
        raise RequestError(f"{count} log-probabilities of prompts in one request; {of}: ask for fewer at once")


def size_of_rows(num_texts: int, *, unconditional: bool) -> int:
    """In sequences. `unconditional`: each is scored by itself, too."""
    return -(-num_texts * (1 + unconditional) // ROWS)


def _and_tidy_up(function: Callable[[], Result]) -> Result:
    try:
        return function()
    finally:
        give_memory_back()


def give_memory_back() -> None:
    """Let the system have what was freed: of a text of 4 MiB the tokenizer leaves 450 MiB with the C library. Takes up
    to a tenth of a second. Other threads run on, but for one that asks for memory of the arena at hand: it waits,
    0.14 s where 350 MiB lie there in small pieces."""
    if _TRIM is not None:
        _TRIM(0)


def _bearer_digest(authorization: str | None) -> bytes | None:
    scheme, _, key = (authorization or "").partition(" ")
    return hashlib.sha256(key.strip().encode()).digest() if scheme.lower() == "bearer" and key.strip() else None


def _is_one_of(found: bytes, known: Sequence[bytes]) -> bool:
    """In the same time whichever it is, and whether it is one."""
    is_known = False
    for digest in known:
        is_known |= hmac.compare_digest(found, digest)
    return is_known
