"""From an engine to a listening server, and from SIGTERM to an orderly end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import APIRouter

from niwaki import __version__
from niwaki.runtime.link.frames import loaded_by
from niwaki.runtime.link.remote_engine import RemoteEngine
from niwaki.runtime.server.app import make_app
from niwaki.runtime.server.branches import Branches, branches_router
from niwaki.runtime.server.chat import Prompts
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.conversations import Conversations
from niwaki.runtime.server.heads import MAX_HEAD_BYTES, heads_within
from niwaki.runtime.server.hosted import Hosted
from niwaki.runtime.server.listen import bound, url_of
from niwaki.runtime.server.programs import ServedProgram, programs_router
from niwaki.runtime.server.responses import responses_router
from niwaki.runtime.server.scripts import scripts_router
from niwaki.runtime.server.served import ServedModel
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.session_routes import sessions_router
from niwaki.runtime.server.sessions import Sessions
from niwaki.runtime.server.store import open_store
from niwaki.runtime.server.tracing import Tracing

# Behind the drain: responses are written, connections closed. What is slower than this is cut off.
CLOSING_SECONDS = 2

# Of Python's garbage: 30 times as seldom through all that there is as usual. That takes 0.1 to 0.2 s beside 2,000 open
# connections, in which nobody is answered; under full load it came every 3 s, for some thousand objects.
COLLECTIONS = (700, 10, 300)


def serve(
    config: ServerConfig, listeners: Sequence[socket.socket], engine: Hosted, programs: Sequence[ServedProgram] = ()
) -> None:
    """Answer on sockets as `bound` gives them until SIGTERM or SIGINT; then every request is answered or told."""
    server = make_server(config, engine, programs)
    said = f"niwaki serves {server.model_name} on {url_of(config, config.port)}"
    if config.metrics_port is not None:
        said += f"\nmetrics on {url_of(config, config.metrics_port)}/metrics"
    server.when_started.append(lambda: print(said, flush=True))  # not before: a bound socket still refuses
    gc.collect()
    gc.freeze()  # to go through all that was loaded held every stream up for 0.03 s now and then
    gc.set_threshold(*COLLECTIONS)
    server.run(sockets=list(listeners))


@contextmanager
def serving(
    engine: Hosted, config: ServerConfig | None = None, programs: Sequence[ServedProgram] = ()
) -> Iterator[str]:
    """Serve an engine that was started, wherever it runs, from a thread of this process while the block runs.

    Gives the URL. For notebooks and tests.

    Raises:
        OSError: the port is taken.
    """
    with bound(config or ServerConfig(port=0)) as (config, listeners):
        server = make_server(config, engine, programs)
        thread = threading.Thread(target=server.run, kwargs={"sockets": listeners}, name="niwaki-server")
        thread.start()
        server.has_started.wait()
        try:
            yield url_of(config, config.port)
        finally:
            server.stop()
            thread.join()


def served_model(engine: Hosted) -> ServedModel:
    """The server's side of a model that an engine has loaded."""
    loaded = engine.loaded if isinstance(engine, RemoteEngine) else loaded_by(engine)
    return ServedModel(
        info=engine.backend.info(),
        tokenizer=engine.tokenizer,
        prompts=Prompts(engine.tokenizer),
        vocab_size=loaded.vocab_size,
        longest=min(loaded.context_length, loaded.pool_tokens),
        max_running=loaded.max_running,
        settings={**loaded.settings, "version": __version__},
    )


def make_server(config: ServerConfig, engine: Hosted, programs: Sequence[ServedProgram] = ()) -> _Server:
    backend = engine.backend
    service = Service(config, served_model(engine), backend)
    branches = Branches(backend)
    sessions = Sessions(open_store(config.sessions), Conversations(backend, config.session_seconds))
    service.at_close += [branches.close_all, sessions.close]
    if isinstance(engine, RemoteEngine):
        service.at_start.append(lambda: engine.read_on(asyncio.get_running_loop()))
        service.at_close.append(lambda: engine.read_on(None))
    return _Server(
        service,
        programs_router(programs, backend),
        branches_router(branches),
        scripts_router(branches),
        sessions_router(sessions, branches),
        responses_router(sessions),
    )


class _Server(uvicorn.Server):
    """uvicorn, with an end of our own: refuse new work at once, let what runs finish, tell the rest, then close."""

    def __init__(self, service: Service, *more: APIRouter) -> None:
        config = service.config
        tracing = Tracing.to(config.otlp_endpoint)
        service.at_close.append(tracing.close)
        super().__init__(
            uvicorn.Config(
                make_app(service, __version__, *more, tracing=tracing),
                http=heads_within(config.head_seconds),  # h11: its limits are those that were tested
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self.has_started = threading.Event()
        self.when_started: list[Callable[[], None]] = []

    @property
    def model_name(self) -> str:
        return self._service.model_names[0]

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
