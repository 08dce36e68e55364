"""From an engine to a listening server, and from SIGTERM to an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import APIRouter

from niwaki import __version__
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.app import make_app
from niwaki.runtime.server.branches import Branches, branches_router
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.listen import bind, url_of
from niwaki.runtime.server.programs import ServedProgram, programs_router
from niwaki.runtime.server.service import ServedModel, Service

MAX_HEADER_BYTES = 64 * 2**10
# Behind the drain: responses are written, connections closed. What is slower than this is cut off.
CLOSING_SECONDS = 2


def serve(
    config: ServerConfig,
    listener: socket.socket,
    model: Path | None = None,
    options: Mapping[str, object] | None = None,
    programs: Sequence[ServedProgram] = (),
) -> None:
    """Load a model and answer on a bound socket until SIGTERM or SIGINT; then every request is answered or told.

    Raises:
        ConfigError, ModelError: as `Engine`.
    """
    with Engine(model, **dict(options or {})) as engine:
        _warm_up(engine)
        server = make_server(config, engine, programs)
        said = f"niwaki serves {server.model_name} on {url_of(config, listener)}"
        server.when_started.append(lambda: print(said, flush=True))  # not before: a bound socket still refuses
        server.run(sockets=[listener])


def _warm_up(engine: Engine) -> None:
    """Run every kernel once, greedy and sampled: what is compiled at its first use is compiled before anybody waits."""
    for temperature in (0.0, 1.0):
        engine.generate("a", {"max_new_tokens": 2, "temperature": temperature, "ignore_eos": True})
    engine.flush_cache()


@contextmanager
def serving(
    engine: Engine, config: ServerConfig | None = None, programs: Sequence[ServedProgram] = ()
) -> Iterator[str]:
    """Serve an engine from a thread of this process while the block runs; gives the URL. For notebooks and tests.

    Raises:
        OSError: the port is taken.
    """
    config = config or ServerConfig(port=0)
    with bind(config) as listener:
        server = make_server(config, engine, programs)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="niwaki-server")
        thread.start()
        server.has_started.wait()
        try:
            yield url_of(config, listener)
        finally:
            server.stop()
            thread.join()


def make_service(config: ServerConfig, engine: Engine) -> Service:
    """A service on an engine of this process."""
    settings = engine.get_server_info()
    info = engine.backend.info()
    pool_tokens = settings["kv_tokens"]
    assert isinstance(pool_tokens, int)
    model = ServedModel(
        info=info,
        tokenizer=engine.tokenizer,
        vocab_size=engine.vocab_size,
        longest=min(info.context_length, pool_tokens),
        max_running=engine.config.max_running_requests,
        settings={**settings, "version": __version__},
    )
    return Service(config, model, engine.backend)


def make_server(config: ServerConfig, engine: Engine, programs: Sequence[ServedProgram] = ()) -> _Server:
    service = make_service(config, engine)
    branches = Branches(engine.backend)
    service.at_close.append(branches.close_all)
    return _Server(service, programs_router(programs, engine), branches_router(branches))


class _Server(uvicorn.Server):
    """uvicorn, with an end of our own: refuse new work at once, let what runs finish, tell the rest, then close."""

    def __init__(self, service: Service, *more: APIRouter) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, __version__, *more),
                http="h11",  # its limits are those that were tested
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self.has_started = threading.Event()
        self.when_started: list[Callable[[], None]] = []

    @property
    def model_name(self) -> str:
        return self._service.model.info.model

    def stop(self) -> None:
        """Begin to end; asked a second time, do not wait for what runs. May be called on any thread."""
        if self._service.is_draining:
            self._service.hurry()
        self._service.refuse()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert sig in (signal.SIGINT, signal.SIGTERM)
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
            for tell in self.when_started:
                tell()
        finally:
            self.has_started.set()

    async def on_tick(self, counter: int) -> bool:
        if self._service.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self._service.drain())
        if self._draining is not None and self._draining.done():
            self.should_exit = True
        return await super().on_tick(counter)
