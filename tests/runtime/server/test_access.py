"""Who may ask what: keys, namespaces, host names, and what no answer and no log ever holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import httpx2
import pytest

from niwaki.runtime.api import ConfigError, GenerationError
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.elsewhere import PAGES
from niwaki.runtime.server.errors import as_api_error
from niwaki.runtime.server.listen import bound, url_of
from niwaki.runtime.server.serve import make_server, serving

ANN, BOB, ADMIN = "ann-has-a-key", "bob-has-a-key", "the-admin-key"
CLOSED = ["/v1/models", "/v1/models/toy", "/metrics", "/openapi.json", "/model_info", "/get_server_info"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/v1/tokenize", "/detokenize"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(engine: Engine) -> Iterator[httpx2.Client]:
    config = ServerConfig(port=0, key_digests=digests([ANN, BOB]), admin_digest=digests([ADMIN])[0])
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("key", ["", "wrong-wrong", ANN + "x", ANN[:-1], ANN.upper()])
def test_without_a_good_key_every_page_but_health_is_closed(guarded: httpx2.Client, key: str) -> None:
    headers = bearer(key) if key else {}
    for page in CLOSED:
        assert guarded.get(page, headers=headers).status_code == 401, page
    for page in POSTS:
        answer = guarded.post(page, json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 401, page
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/health").status_code == guarded.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/V1/models",
        "/v1/models/",
        "/openapi.json/",
        "/v1//models",
        "/v1/%6dodels",
        "/v1/../v1/models",
        "/health/../metrics",
    ],
)
def test_no_spelling_of_a_page_goes_around_the_key(guarded: httpx2.Client, path: str) -> None:
    request = guarded.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    answer = guarded.send(request)
    assert answer.status_code in (401, 404)
    assert "toy" not in answer.text


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/models"])
def test_an_address_without_its_v1_is_told_so(guarded: httpx2.Client, path: str) -> None:
    told = guarded.post(path, json={}).json()["error"]
    assert told["message"] == "no such page; the address of OpenAI's API ends with /v1, once"
    assert guarded.post("/elsewhere", json={}).json()["error"]["message"] == "no such page"


def test_a_page_of_another_server_is_told_by_its_name_here(guarded: httpx2.Client) -> None:
    told = guarded.post("/completion", json={"prompt": "the cat"}).json()["error"]
    assert (told["code"], told["message"]) == ("not_found", "no such page; here it is /v1/completions")
    paths = guarded.get("/openapi.json", headers=bearer(ANN)).json()["paths"]
    assert set(PAGES.values()) <= {*paths, "/metrics"}
    assert not set(PAGES) & set(paths)


def test_every_route_but_two_needs_the_key(guarded: httpx2.Client) -> None:
    paths = guarded.get("/openapi.json", headers=bearer(ANN)).json()["paths"]
    for path, methods in paths.items():
        if path in ("/health", "/ready"):
            continue
        for method in methods:
            answer = guarded.request(method, path.replace("{name}", "toy"))
            assert answer.status_code in (401, 404), (method, path)


def test_the_port_of_metrics_needs_no_key_and_has_nothing_else(engine: Engine) -> None:
    config = ServerConfig(port=0, metrics_port=0, key_digests=digests([ANN]), allowed_hosts=("niwaki.example",))
    with bound(config) as (config, listeners):
        server = make_server(config, engine)
        thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
        thread.start()
        server.has_started.wait()
        assert config.metrics_port is not None
        try:
            usual, metrics = url_of(config, config.port), url_of(config, config.metrics_port)
            assert usual != metrics
            scraped = httpx2.get(f"{metrics}/metrics")  # by its address, as Prometheus finds it
            assert (scraped.status_code, "niwaki_requests_waiting" in scraped.text) == (200, True)
            assert httpx2.get(f"{metrics}/health").status_code == httpx2.get(f"{metrics}/ready").status_code == 200
            named = {"host": "niwaki.example"}
            assert httpx2.get(f"{usual}/metrics", headers=named).status_code == 401
            assert httpx2.get(f"{usual}/metrics", headers=named | bearer(ANN)).status_code == 200
            for page in ("/", "/v1/models", "/metrics/", "/openapi.json", "/flush_cache", "/page/api.js"):
                assert httpx2.get(f"{metrics}{page}", headers=bearer(ANN)).status_code == 404, page
            assert httpx2.post(f"{metrics}/v1/completions", headers=bearer(ANN), json={}).status_code == 404
        finally:
            server.stop()
            thread.join()


def test_two_ports_are_two() -> None:
    with pytest.raises(ConfigError, match="both 30000"):
        ServerConfig(metrics_port=30000)
    with pytest.raises(ConfigError, match="metrics_port must be"):
        ServerConfig(metrics_port=70000)


def test_each_of_several_keys_opens_and_the_admin_key_too(guarded: httpx2.Client) -> None:
    for key in (ANN, BOB, ADMIN):
        assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200


def test_administrative_pages_are_not_there_for_others(guarded: httpx2.Client) -> None:
    for headers in ({}, bearer(ANN)):
        assert guarded.post("/flush_cache", headers=headers).status_code == 404
    assert guarded.post("/flush_cache", headers=bearer(ADMIN)).status_code == 200


def test_keys_without_an_admin_key_leave_no_administrator(engine: Engine) -> None:
    config = ServerConfig(port=0, key_digests=digests([ANN]))
    with serving(engine, config) as url:
        assert httpx2.post(f"{url}/flush_cache", headers=bearer(ANN)).status_code == 404


def test_one_key_never_hits_what_another_put_into_the_cache(guarded: httpx2.Client) -> None:
    body = {"prompt": "a secret that only ann knows " * 3, "max_tokens": 1, "cache_salt": "same"}

    def cached(key: str) -> int:
        answer = guarded.post("/v1/completions", json=body, headers=bearer(key))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached(ANN)
    assert cached(ANN) > 10
    assert cached(BOB) == 0


def test_a_foreign_host_name_is_refused_on_loopback(client: httpx2.Client) -> None:
    for host in ("evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert client.get("/health", headers={"host": host}).status_code == 400, host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:30000", "[::1]:30000"):
        assert client.get("/health", headers={"host": host}).status_code == 200, host


def test_a_server_with_names_is_probed_by_its_address(engine: Engine) -> None:
    """Kubernetes' probes ask the pod's address, whatever names its service has."""
    with serving(engine, ServerConfig(port=0, allowed_hosts=("niwaki.example",))) as url:
        assert [httpx2.get(f"{url}/{page}").status_code for page in ("health", "ready")] == [200, 200]
        foreign = httpx2.get(f"{url}/v1/models")
        assert foreign.status_code == 400
        assert "--allowed-host" in foreign.text
        assert httpx2.get(f"{url}/v1/models", headers={"host": "niwaki.example"}).status_code == 200


@pytest.mark.parametrize("page", ["/health", "/v1/models", "/"])
def test_what_can_be_read_can_be_asked_for_without_its_body(client: httpx2.Client, page: str) -> None:
    whole, head = client.get(page), client.head(page)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


def test_a_request_id_is_echoed_when_it_may_stand_in_a_header(client: httpx2.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    given = [client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("x" * 129, "a b")]
    assert all(len(made) == 32 for made in given)


def test_what_went_wrong_inside_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="niwaki.server"):
        told = as_api_error(GenerationError("RuntimeError: 0x7f00 /home/someone/secret"))
    assert told.status == 500
    assert "secret" not in told.message
    error_id = told.message.rpartition(" ")[2]
    assert error_id in caplog.text


def test_prompts_and_keys_are_in_no_log_and_no_metric(guarded: httpx2.Client, caplog: pytest.LogCaptureFixture) -> None:
    canary = "canary prompt 4711"
    with caplog.at_level(logging.INFO):
        guarded.post("/v1/completions", json={"prompt": canary, "max_tokens": 1}, headers=bearer(ANN))
        refused = guarded.post("/v1/completions", json={"prompt": canary, "n": canary}, headers=bearer(ANN))
        metrics = guarded.get("/metrics", headers=bearer(ANN)).text
    own = "".join(record.getMessage() for record in caplog.records if not record.name.startswith("http"))
    for text in (own, refused.text, metrics, guarded.get("/openapi.json", headers=bearer(ANN)).text):
        assert canary not in text
        assert ANN not in text


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8 characters, got 3"):
        digests(["abc"])
    with pytest.raises(ConfigError, match="port must be"):
        ServerConfig(port=70000)
