"""One small engine behind one server, on a free port of this machine, for all tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving
from tests.runtime.server.described import Described
from tests.toy import make_model


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "toy", sharpness=3.0)


@pytest.fixture(scope="session")
def engine(toy_folder: Path) -> Iterator[Engine]:
    with Engine(toy_folder, kv_tokens=8192) as made:
        yield made


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as made:
        yield made


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


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stats = engine.stats()
        if stats["pages_held"] == stats["requests_running"] == stats["requests_waiting"] == 0:
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"not idle: {engine.stats()}")
    engine.backend.check()
