"""From start to end: full queues, numbers, the API's own description, and a SIGTERM that loses nobody."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from jsonschema import ValidationError  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.link.engine_process import EngineProcess
from niwaki.runtime.server import logs
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.listen import bind
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held
from tests.runtime.server.described import Described

ROOT = Path(__file__).parents[3]
LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def test_a_full_queue_is_told_at_once_and_says_when_to_come_back(toy_folder: Path) -> None:
    config = ServerConfig(port=0, max_queued=0)
    with (
        Engine(toy_folder, kv_tokens=2048, max_running_requests=2) as engine,
        serving(engine, config) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        held(engine),
        client.stream("POST", "/v1/completions", json=LONG | {"n": 2, "stream": True}),
    ):
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        assert client.get("/ready").status_code == 200


def test_a_stopped_engine_is_neither_healthy_nor_ready(toy_folder: Path) -> None:
    with Engine(toy_folder, kv_tokens=2048) as engine, serving(engine) as url:
        engine.shutdown()
        with httpx2.Client(base_url=url, timeout=60) as client:
            assert client.get("/health").status_code == 503
            assert client.get("/ready").status_code == 503
            assert client.post("/v1/completions", json=LONG).status_code == 503


def test_only_pages_of_origins_that_were_named_may_ask(engine: Engine, client: httpx2.Client) -> None:
    asking = {"origin": "https://team.example", "access-control-request-method": "POST"}
    assert client.options("/v1/models", headers=asking).status_code == 405
    assert "access-control-allow-origin" not in client.get("/v1/models", headers=asking).headers
    config = ServerConfig(port=0, cors_origins=("https://team.example",), key_digests=digests(["a-key-of-ours"]))
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=60) as open_client:
        preflight = open_client.options("/v1/models", headers=asking)
        assert preflight.status_code == 200  # a browser sends no key with it
        assert preflight.headers["access-control-allow-origin"] == "https://team.example"
        assert open_client.get("/v1/models", headers=asking).status_code == 401
        ahead = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,idempotency-key,traceparent,x-stainless-lang",
        }
        assert open_client.options("/v1/chat/completions", headers=asking | ahead).status_code == 200
        foreign = open_client.options("/v1/models", headers=asking | {"origin": "https://evil.example"})
        assert foreign.status_code == 400
        assert "access-control-allow-origin" not in foreign.headers


def make_certificate(certificate: Path, key: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_a_certificate_it_speaks_https(engine: Engine, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(certificate, key)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serving(engine, ServerConfig(port=0, tls_cert=certificate, tls_key=key)) as url:
        assert url.startswith("https://")
        assert httpx2.get(f"{url}/ready", verify=trust).status_code == 200
    with pytest.raises(ConfigError, match="no file"):
        ServerConfig(tls_cert=tmp_path / "none.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_key_that_is_not_the_certificates_is_told_by_its_option_and_file(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(cert, key)
    make_certificate(tmp_path / "other.pem", tmp_path / "other-key.pem")
    ServerConfig(tls_cert=cert, tls_key=key)
    locked = tmp_path / "locked.pem"
    secret = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(secret, check=True, capture_output=True)
    for wrong, said in (
        (tmp_path / "other-key.pem", f"--tls-key: {tmp_path}/other-key.pem holds no key of the certificate {cert}"),
        (cert, f"--tls-key: {cert} holds no key of the certificate {cert}"),
        (locked, f"--tls-key: the key in {locked} is encrypted"),
        (None, f"--tls-cert, without --tls-key: {cert} holds no key of the certificate {cert}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            ServerConfig(tls_cert=cert, tls_key=wrong)


def test_logs_are_json_lines_under_the_id_of_their_request(client: httpx2.Client) -> None:
    written = io.StringIO()
    with logs.configured("info", "json", written):
        client.post("/v1/completions", json={"prompt": "canary", "max_tokens": 1}, headers={"x-request-id": "mine-7"})
        client.get("/nowhere?prompt=canary", headers={"x-request-id": "mine-8"})
        # A line is written when the server, too, is done.
        wait_until(lambda: all(name in written.getvalue() for name in ("mine-7", "mine-8")))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    told = {line["request_id"]: line for line in lines if line["logger"] == "niwaki.access"}
    assert (told["mine-7"]["path"], told["mine-7"]["status"]) == ("/v1/completions", 200)
    assert (told["mine-8"]["path"], told["mine-8"]["status"]) == ("/nowhere", 404)
    assert told["mine-7"]["seconds"] > 0
    assert "canary" not in written.getvalue()


def test_the_api_describes_its_bodies_and_no_reference_dangles(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    text = json.dumps(document)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"], name
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/generate", "/health"}


def test_every_json_answer_has_a_model_that_holds_it_to_its_fields(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            kinds = [kind for answer in operation["responses"].values() for kind in answer["content"].items()]
            assert all("$ref" in kind["schema"] for name, kind in kinds if name == "application/json"), path
    card = client.get("/v1/models/toy")
    for wrong in ({**card.json(), "more": 1}, {"id": "toy"}):
        with pytest.raises(ValidationError):
            Described(document).check(httpx2.Response(200, json=wrong, request=card.request))
    with pytest.raises(AssertionError, match="302 is not described"):
        Described(document).check(httpx2.Response(302, json={}, request=card.request))


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
        for child in children:
            yield from family(int(child))


def tcp_sockets(pid: int) -> list[tuple[int, int, bool]]:
    """(its port, the other side's, does it listen) of each socket of these processes that a network reaches."""
    held = {os.readlink(link) for one in family(pid) for link in Path(f"/proc/{one}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, own, other, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in held:
                found.append((int(own[-4:], 16), int(other[-4:], 16), state == "0A"))
    return found


def test_niwaki_serve_answers_until_sigterm_and_exits_with_0(toy_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "niwaki",
        "serve",
        "--model",
        str(toy_folder),
        "--port",
        "0",
        "--kv-tokens",
        "2048",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        guard = threading.Timer(180, server.kill)  # a server that never starts fails the test, it does not stop the run
        guard.start()
        try:
            url = server.stdout.readline().split()[-1]
            with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=120) as answer:
                lines = answer.iter_lines()
                next(lines)
                if Path("/proc/self/net/tcp").exists():
                    port = int(url.rpartition(":")[2])
                    assert len(list(family(server.pid))) > 1, "the engine is a process of its own"
                    sockets = tcp_sockets(server.pid)
                    assert [one[:2] for one in sockets if one[2]] == [(port, 0)], "one door"
                    assert {own for own, _, _ in sockets} == {port}, "nobody was called up"
                server.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert server.wait(timeout=60) == 0
            assert not [line for line in server.stderr if "kernels" not in line], "of compiling alone, the first time"
        finally:
            guard.cancel()
            server.kill()  # nothing where it has ended; where the test failed, leaving the block would wait for it


def test_the_body_of_a_small_answer_waits_for_nobody() -> None:
    """Head and body are written one after the other: without TCP_NODELAY the second waits 40 ms for the client."""

    async def is_sent_at_once() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        listener = bind(ServerConfig(port=0))
        async with await asyncio.start_server(take, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            is_set = await found
            writer.close()
            await writer.wait_closed()
            return is_set

    assert asyncio.run(is_sent_at_once())


def test_no_address_in_a_body_is_asked_for_anything(client: httpx2.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        there = f"http://127.0.0.1:{canary.getsockname()[1]}/x.png"
        part = {"type": "image_url", "image_url": {"url": there}}
        for page, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": there}]}]}),
            ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_label": "x", "server_url": there}]}),
            ("/generate", {"text": "x", "image_data": there}),
            ("/generate", {"text": "x", "sampling_params": {"json_schema": json.dumps({"$ref": there})}}),
        ):
            assert client.post(page, json=body).status_code == 400, page
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_a_folder_without_a_whole_model_is_told_of_before_an_engine_could(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from niwaki.__main__ import main

    torn = tmp_path / "torn"
    shutil.copytree(toy_folder, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    started: list[EngineProcess] = []
    monkeypatch.setattr(EngineProcess, "launch", started.append)
    for folder, said in (
        (str(torn), "the download may be incomplete"),
        (str(tmp_path), "config.json is missing"),
        ("team/llama", "hf download team/llama --local-dir FOLDER"),
    ):
        assert main(["serve", "--port", "0", "--model", folder]) == 1
        told = capsys.readouterr().err
        assert said in told
        assert told.count("\n") == 1
    assert not started


def test_a_taken_port_is_one_line_before_any_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "niwaki", "serve", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"niwaki: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--port", "70000"], "port must be"),
        (["--api-key", "abc"], "at least 8"),
        (["--model", "nowhere"], "model folder nowhere does not exist"),
        (["--tls-cert", "nowhere.pem"], "--tls-cert: no file nowhere.pem"),
        (["--tls-key", "nowhere.pem"], "--tls-key without --tls-cert"),
        (["--tls-cert", __file__], f"--tls-cert: {__file__} holds no certificate in PEM"),
        (["--otlp-endpoint", "nope"], "--otlp-endpoint takes a URL, as http://collector:4318/v1/traces; got 'nope'"),
        (["--otlp-endpoint", "collector:4318"], "got 'collector:4318'"),
        (["--otlp-endpoint", "http://collector:x"], "got 'http://collector:x'"),
    ],
)
def test_a_wrong_option_is_one_line(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from niwaki.__main__ import main

    assert main(["serve", "--port", "0", *option]) == 1
    assert said in capsys.readouterr().err
