"""One small engine behind one server, on a free port of this machine, for all tests of this folder."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.api import Constraint, Generation
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.protocol import CompiledConstraint
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving
from niwaki.runtime.server.store import Turn
from niwaki.runtime.server.store_sql import SqlStore
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.browser import Browser, browsing
from tests.runtime.server.described import Described
from tests.toy import make_model

LONG_TOKENS = 99_000


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "toy", sharpness=3.0)


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with room for an answer of LONG_TOKENS: half a minute at the least."""
    folder = tmp_path_factory.mktemp("served") / "long"
    return make_model(folder, sharpness=3.0, max_position_embeddings=LONG_TOKENS + 512)


@pytest.fixture(scope="session")
def engine(toy_folder: Path) -> Iterator[Engine]:
    with Engine(toy_folder, kv_tokens=8192) as made:
        yield made


@pytest.fixture
def started(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """What the engine generates in this test, in the order in which it began."""
    found: list[Generation] = []
    start = engine.backend.start

    def noted(*args: object, **options: object) -> Generation:
        found.append(start(*args, **options))  # type: ignore[arg-type]  # what it was given
        return found[-1]

    monkeypatch.setattr(engine.backend, "start", noted)
    return found


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def page(browser: Browser, engine: Engine) -> Iterator[Browser]:
    """The page of a server without sessions yet, and nothing on its console afterwards."""
    with serving(engine) as address:
        browser.open(address)
        browser.wait("document.querySelector('#model').textContent.startsWith('toy')")
        browser.run("document.querySelector('[name=max_tokens]').value = 12")
        yield browser
        assert browser.complaints() == []
        browser.open("about:blank")


@pytest.fixture(scope="session", autouse=True)
def every_answer_is_as_described(url: str) -> Iterator[None]:
    """Whatever a test is answered by a server's page: /openapi.json has its status, its type and all of its fields."""
    described = Described(httpx2.get(f"{url}/openapi.json").json())
    with pytest.MonkeyPatch.context() as patch:
        send = httpx2.Client.send

        def checked(self: httpx2.Client, request: httpx2.Request, **more: object) -> httpx2.Response:
            response = send(self, request, **more)  # type: ignore[arg-type]  # httpx2's own
            if not more.get("stream") or response.is_closed:
                described.check(response)
            return response

        patch.setattr(httpx2.Client, "send", checked)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: nothing runs, every page is accounted for."""
    yield
    if "engine" in request.fixturenames:
        wait_until_idle(request.getfixturevalue("engine"))


@pytest.fixture
def paths_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The turns up to which a path is read from the store of sessions, while the test runs."""
    read: list[str] = []
    path = SqlStore.path

    def noted(self: SqlStore, owner: str, turn_id: str) -> list[Turn]:
        read.append(turn_id)
        return path(self, owner, turn_id)

    monkeypatch.setattr(SqlStore, "path", noted)
    return read


def wait_until_idle(engine: Engine) -> None:
    def is_idle() -> bool:
        stats = engine.stats()
        return stats["pages_held"] == stats["requests_running"] == stats["requests_waiting"] == 0

    wait_until(is_idle)
    engine.backend.check()


def nobody_waits(client: httpx2.Client) -> bool:
    """Whether the server has noticed that its clients are gone or answered, and cancelled what ran for them."""
    return "niwaki_sequences_in_flight 0.0" in client.get("/metrics").text


@contextmanager
def compiling_held() -> Iterator[threading.Semaphore]:
    """Nothing in this process is compiled until the block ends; what is given counts who waits for that."""
    begun, gate = threading.Semaphore(0), threading.Event()
    plain = ConstraintCompiler.compile

    def compile(self: ConstraintCompiler, constraint: Constraint) -> CompiledConstraint:
        begun.release()
        gate.wait(PATIENCE)
        return plain(self, constraint)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ConstraintCompiler, "compile", compile)
        try:
            yield begun
        finally:
            gate.set()


@contextmanager
def held(engine: Engine, steps: int = 8) -> Iterator[Callable[[], None]]:
    """From the first request on the engine makes `steps` steps, and the next ones when the block ends or what it gives
    was called: what runs goes on running for as long as a test needs, however fast or slow the machine."""
    backend, gate, taken = engine.backend, threading.Event(), itertools.count(1)

    def wait() -> None:
        if engine.stats()["requests_running"] and next(taken) >= steps:
            gate.wait(PATIENCE)

    before, backend.after_step = backend.after_step, wait
    try:
        yield gate.set
    finally:
        gate.set()
        backend.after_step = before
