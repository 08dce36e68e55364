"""Programs as pages: typed in, typed out, and a failure is that call's own."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from pydantic import BaseModel

import niwaki as nw
from niwaki.lang.endpoint import Endpoint
from niwaki.lang.program import Program
from niwaki.lang.state import State
from niwaki.runtime.api import EngineStopped, Generation
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.keys import KeyLimits
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.programs import _Run
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held, nobody_waits, wait_until_idle
from tests.runtime.server.described import Described

ROOT = Path(__file__).parents[3]
KEY = {"authorization": "Bearer a-key-of-ours"}


@nw.function
def guess(s: State, text: str, kind: Literal["animal", "number"] = "animal", schema: int = 0) -> None:
    """Says which animal or number it is."""
    s += text
    s += nw.gen("answer", choices=["cat", "dog"]) if kind == "animal" else nw.gen("answer", dtype=int, max_new_tokens=5)


@nw.function
async def total(s: State, numbers: list[float]) -> dict[str, float]:
    s += "the"
    s += nw.gen("word", max_new_tokens=2)
    await s.get("word")
    return {"total": sum(numbers)}


@nw.function
def breaks(s: State, how: str) -> None:
    s += "the"
    if how == "capacity":
        s += nw.gen("x", max_new_tokens=100_000)
    raise RuntimeError(f"a secret about {how}")


@nw.function
def shapes(s: State, pattern: str) -> None:
    s += "the"
    s += nw.gen("x", regex=pattern, max_new_tokens=4)


@nw.function
def errs(s: State, how: str = "", labels: list[str] | None = None, room: int = 4) -> None:
    s += "the"
    if how == "misuse":
        s += 5  # type: ignore[arg-type]  # that is the point
    if how == "unknown":
        s["nothing sets it"]
    if how == "type":
        how + 5  # type: ignore[operator]  # likewise
    if how == "config":
        s.fork(0)
    s += nw.gen("x", choices=labels) if labels else nw.gen("x", max_new_tokens=room)


@nw.function
def never(s: State, text: str) -> None:
    s += text + nw.gen("x", regex="(")


@nw.function
def endless(s: State) -> None:
    s += "the"
    for _ in range(5000):  # forks, so that the text does not outgrow the context
        (twin,) = s.fork(1)
        twin += nw.gen("x", max_new_tokens=4, ignore_eos=True)
        twin["x"]


ENDS: dict[str, BaseException] = {"exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "own": BaseException("own")}


@nw.function
def ends(s: State, how: str) -> None:
    raise ENDS[how]


@nw.function
async def ends_on_the_loop(s: State, how: str) -> None:
    raise asyncio.CancelledError if how == "cancel" else ENDS[how]


class Verdict(BaseModel):
    word: str


@nw.function
def typed(s: State, day: datetime.date, point: tuple[int, float], price: Decimal, names: dict[int, str]) -> str:
    return f"{day.year} {point} {price} {names}"


@nw.function
def judge(s: State, text: str) -> Verdict:
    s += text
    s += nw.gen("word", max_new_tokens=120, ignore_eos=True)
    s += " and "
    s += nw.gen("number", dtype=int, max_new_tokens=3)
    s["seen"] = True
    return Verdict(word=str(s["word"]))


@nw.function
def fills(s: State, text: str, times: int = 1) -> None:
    s += text
    s += nw.gen("schema", dtype=Literal["cat", "dog"]) + nw.gen("_number", dtype=int, max_new_tokens=4)
    forks = s.fork(2)
    forks += nw.gen("more", max_new_tokens=2)
    forks.join()
    s["seen"] = True


def events_of(lines: Iterable[str]) -> list[dict[str, object]]:
    told = [line.removeprefix("data: ") for line in lines if line]
    assert told[-1] == "[DONE]"
    return [json.loads(line) for line in told[:-1]]


@pytest.fixture(scope="module")
def programs(engine: Engine) -> Iterator[httpx2.Client]:
    served = [Endpoint(program) for program in (guess, total, breaks, shapes, endless, typed, judge, fills)]
    config = ServerConfig(port=0, key_digests=digests(["a-key-of-ours"]))
    with serving(engine, config, served) as url, httpx2.Client(base_url=url, timeout=60, headers=KEY) as client:
        yield client


def test_the_index_tells_of_each_program_what_it_takes_and_answers(programs: httpx2.Client) -> None:
    told = programs.get("/programs").json()["programs"]
    assert [one["name"] for one in told] == ["guess", "total", "breaks", "shapes", "endless", "typed", "judge", "fills"]
    card = told[0]
    assert card["description"] == "Says which animal or number it is."
    assert card["parameters"]["required"] == ["text"]
    assert card["parameters"]["properties"]["kind"]["enum"] == ["animal", "number"]
    assert programs.get(card["path"]).json() == card
    assert set(told[6]["answer"]["properties"]) == {"word", "shortened"}
    assert programs.post(card["path"], json={"text": "the "}).status_code == 200
    assert programs.post(card["batch_path"], json={"rows": [{"text": "the "}]}).status_code == 200
    document = programs.get("/openapi.json").json()
    assert {"get", "post"} <= set(document["paths"]["/programs/guess"])
    assert "get" in document["paths"]["/programs"]


def test_the_index_is_for_who_has_a_key_and_empty_where_nothing_is_served(programs: httpx2.Client, url: str) -> None:
    for path in ("/programs", "/programs/guess"):
        assert programs.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert httpx2.get(f"{url}/programs").json() == {"programs": []}
    assert httpx2.get(f"{url}/programs/guess").status_code == 404


def test_values_that_a_budget_made_shorter_are_named(engine: Engine) -> None:
    @nw.function
    def tells(s: State, text: str, room: int) -> None:
        s += text + nw.gen("story", json_schema={"type": "string", "minLength": 20}, max_new_tokens=room, temperature=0)

    with (
        serving(engine, ServerConfig(port=0), [Endpoint(tells)]) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        short = {"text": "the", "room": 24}
        one = client.post("/programs/tells", json=short).json()
        assert one["shortened"] == ["story"]
        assert len(json.loads(one["story"])) >= 20
        rows = client.post("/programs/tells/batch", json={"rows": [short]}).json()["results"]
        assert rows == [{"values": one}]
        last = events_of(client.post("/programs/tells?stream=true", json=short).text.splitlines())[-1]
        assert last == {"values": one}


@pytest.mark.parametrize("streams", ["true", "false"])
def test_a_program_asks_for_pieces_where_its_client_does(
    programs: httpx2.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, streams: str
) -> None:
    """Others' prompts make way for whoever reads, and each piece costs both processes something."""
    started: list[tuple[object, Generation]] = []
    generate = engine.backend.generate

    def noted(*args: Any, **options: Any) -> Generation:
        generation = generate(*args, **options)
        started.append((options["streams"], generation))
        return generation

    monkeypatch.setattr(engine.backend, "generate", noted)
    assert programs.post(f"/programs/judge?stream={streams}", json={"text": "the cat"}).status_code == 200
    assert [asked for asked, _ in started] == [None, None]
    assert any(generation.is_read for _, generation in started) is (streams == "true")


def test_parameters_go_in_by_name_and_typed_values_come_out(programs: httpx2.Client) -> None:
    assert programs.post("/programs/guess", json={"text": "the "}).json()["answer"] in ("cat", "dog")
    answer = programs.post("/programs/guess", json={"text": "7", "kind": "number", "schema": 5})
    assert isinstance(answer.json()["answer"], int)


def test_metrics_count_what_programs_generate(programs: httpx2.Client) -> None:
    def read(name: str) -> float:
        lines = programs.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"niwaki_{name} ")))

    def counts() -> list[float]:
        return [read(f"{name}_seconds_count") for name in ("time_to_first_token", "request", "queue")]

    before, slept = counts(), read("time_to_first_token_seconds_sum")
    programs.post("/programs/total", json={"numbers": [1]})
    wait_until(lambda: [after - then for after, then in zip(counts(), before, strict=True)] == [1, 1, 1])
    assert read("time_to_first_token_seconds_sum") > slept


def test_an_async_program_answers_what_it_returns(programs: httpx2.Client) -> None:
    assert programs.post("/programs/total", json={"numbers": [1, 2.5]}).json() == {"total": 3.5}


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "text"), ({"text": 5}, "text"), ({"text": "x", "kind": "plant"}, "kind"), ({"text": "x", "no": 1}, "no")],
)
def test_a_wrong_parameter_is_a_400_that_names_it(programs: httpx2.Client, body: object, param: str) -> None:
    answer = programs.post("/programs/guess", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_program_needs_the_key_and_stands_in_the_description(programs: httpx2.Client) -> None:
    assert programs.post("/programs/guess", json={"text": "x"}, headers={"authorization": ""}).status_code == 401
    document = programs.get("/openapi.json").json()
    assert document["paths"]["/programs/guess"]["post"]["description"] == "Says which animal or number it is."
    parameters = document["components"]["schemas"]["guess_parameters"]
    assert parameters["required"] == ["text"]
    assert set(parameters["properties"]) == {"text", "kind", "schema"}


def test_a_failure_is_that_calls_own_and_says_nothing_of_the_inside(
    programs: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "niwaki.server"):
        failed = programs.post("/programs/breaks", json={"how": "badly"})
    assert failed.status_code == 500
    error = failed.json()["error"]
    assert error["message"].startswith("the program failed; error id ")
    usual = "".join(record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG)
    assert error["message"].rpartition(" ")[2] in usual
    assert "RuntimeError" in usual
    for inside in ("test_programs.py", "a secret"):
        assert inside in caplog.text, "at debug level"
        assert inside not in failed.text + usual
    assert programs.post("/programs/guess", json={"text": "the"}).status_code == 200


@pytest.mark.parametrize("program", [ends, ends_on_the_loop])
def test_a_program_that_would_end_the_process_fails_alone(engine: Engine, program: Program) -> None:
    with serving(engine, programs=[Endpoint(program)]) as url, httpx2.Client(base_url=url, timeout=60) as client:
        for more in ("", "?stream=true", "/batch", "/batch?stream=true"):
            for how in (*ENDS, *(["cancel"] if program is ends_on_the_loop else [])):
                body: dict[str, object] = {"how": how}
                path = f"/programs/{program.name}{more}"
                answer = client.post(path, json={"rows": [body] * 2} if "batch" in more else body)
                assert answer.status_code == (200 if more else 500)
                assert "the program failed; error id " in answer.text or "was cancelled" in answer.text


def test_the_log_says_at_debug_level_which_line_was_refused_what_it_asked_for(
    programs: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "niwaki.server"):
        refused = programs.post("/programs/shapes", json={"pattern": "("})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_constraint")
    assert refused.json()["error"]["param"] == "pattern"
    assert 'nw.gen("x", regex=pattern' in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


EVERY_WAY = ["", "?stream=true", "/batch", "/batch?stream=true"]


def errors_of(client: httpx2.Client, path: str, body: dict[str, object]) -> dict[str, Any]:
    """The error that a call of a program ends with, whichever way it is called; a single call's beside its status."""
    answer = client.post(path, json={"rows": [body]} if "batch" in path else body)
    if "stream" in path:
        found = events_of(answer.text.splitlines())[-1]
    else:
        found = answer.json()["results"][0] if "batch" in path else answer.json() | {"status": answer.status_code}
    error = found["error"]
    assert isinstance(error, dict)
    return error | {"status": found["status"]} if "status" in found else error


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("how", ["misuse", "unknown", "type", "config", "regex"])
def test_a_fault_of_the_program_is_none_of_its_caller(
    engine: Engine, caplog: pytest.LogCaptureFixture, how: str, way: str
) -> None:
    name, body = ("never", {"text": "the"}) if how == "regex" else ("errs", {"how": how})
    with (
        serving(engine, ServerConfig(port=0), [Endpoint(errs), Endpoint(never)]) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        caplog.at_level(logging.DEBUG, "niwaki.server"),
    ):
        error = errors_of(client, f"/programs/{name}{way}", dict(body))
    assert error.pop("status", 500) == 500
    told, _, error_id = str(error["message"]).rpartition(" ")
    assert told == "the program failed; error id"
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "internal_error")
    usual = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert [line for line in usual if error_id in line]
    assert "test_programs.py" not in "".join(usual)
    assert "test_programs.py" in caplog.text, "at debug level"


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("shapes", {"pattern": "("}, "pattern"),
        ("errs", {"labels": ["cat", "dog", "cat"]}, "labels"),
        ("errs", {"room": -1}, "room"),
    ],
)
def test_what_an_argument_brings_about_names_it(
    engine: Engine, name: str, body: dict[str, object], param: str, way: str
) -> None:
    with (
        serving(engine, ServerConfig(port=0), [Endpoint(errs), Endpoint(shapes)]) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        error = errors_of(client, f"/programs/{name}{way}", body)
    assert error.pop("status", 400) == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_values_stream_while_they_grow_and_the_answer_comes_last(programs: httpx2.Client, engine: Engine) -> None:
    with (
        held(engine) as release,
        programs.stream("POST", "/programs/judge?stream=true", json={"text": "the"}) as stream,
    ):
        lines = []
        for line in stream.iter_lines():
            lines.append(line)
            release()  # the first event is of a word that grows
    events = events_of(lines)
    words = [event for event in events if event.get("name") == "word"]
    assert len(words) > 1
    texts = [str(event["value"]) for event in words]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [event["done"] for event in words] == [False] * (len(words) - 1) + [True]
    numbers = [event for event in events if event.get("name") == "number"]
    assert [event["done"] for event in numbers] == [True]  # 3 may yet become 36
    assert {"name": "seen", "value": True, "done": True} in events
    assert events[-1] == {"values": {"word": texts[-1]}}


def test_a_stream_that_fails_says_so_where_it_ends(programs: httpx2.Client) -> None:
    events = events_of(programs.post("/programs/breaks?stream=true", json={"how": "badly"}).text.splitlines())
    error = events[-1]["error"]
    assert isinstance(error, dict)
    assert error["message"].startswith("the program failed; error id ")
    assert "secret" not in str(events)


def test_a_batch_gives_each_row_its_values_or_its_own_error(programs: httpx2.Client) -> None:
    rows = [{"text": "the "}, {"text": "7", "kind": "number"}, {"text": "the ", "kind": "animal"}]
    results = programs.post("/programs/guess/batch", json={"rows": rows}).json()["results"]
    assert [sorted(result["values"]) for result in results] == [["answer"]] * 3
    mixed = programs.post("/programs/breaks/batch", json={"rows": [{"how": "capacity"}, {"how": "so"}]}).json()
    assert [result["error"]["code"] for result in mixed["results"]] == ["context_length_exceeded", "internal_error"]
    assert programs.post("/programs/guess/batch", json={"rows": []}).status_code == 400


def test_a_row_whose_value_json_has_nothing_for_harms_no_other(programs: httpx2.Client) -> None:
    rows = [{"numbers": [1]}, {"numbers": [1e308, 1e308]}, {"numbers": [2]}]
    results = programs.post("/programs/total/batch", json={"rows": rows}).json()["results"]
    assert [result.get("values") for result in results] == [{"total": 1}, None, {"total": 2}]
    assert results[1]["error"]["code"] == "internal_error"


def test_a_batch_streams_each_row_with_its_index_as_soon_as_it_is_there(programs: httpx2.Client) -> None:
    rows: list[object] = [{"text": "7"}, {"text": 5}, {"text": "the ", "kind": "plant"}, {"text": "the "}] * 15
    path = "/programs/guess/batch"
    events = events_of(programs.post(f"{path}?stream=true", json={"rows": rows}).text.splitlines())
    told: dict[object, dict[str, object]] = {event.pop("index"): event for event in events}
    whole = programs.post(path, json={"rows": rows}).json()["results"]
    assert [[*told[index]] for index in range(60)] == [[*result] for result in whole]
    assert {str(one["values"]) for one in told.values() if "values" in one} <= {
        "{'answer': 'cat'}",
        "{'answer': 'dog'}",
    }
    assert [*told] != [*range(60)], "what is refused need not wait for what runs"


def test_a_row_that_cannot_be_read_is_refused_alone(programs: httpx2.Client) -> None:
    rows = [{"text": "the "}, {"text": 5}, {}, "no object", {"text": "7", "kind": "plant"}, {"text": "the ", "no": 1}]
    answer = programs.post("/programs/guess/batch", json={"rows": [*rows, rows[0]]})
    assert answer.status_code == 200
    first, *wrong, last = answer.json()["results"]
    assert [[*first["values"]], [*last["values"]]] == [["answer"]] * 2
    assert [one["error"]["param"] for one in wrong] == ["text", "text", None, "kind", "no"]
    assert {one["error"]["type"] for one in wrong} == {"invalid_request_error"}
    none = programs.post("/programs/guess/batch", json={"rows": [{}]})
    assert (none.status_code, [*none.json()["results"][0]]) == (200, ["error"])
    bodies: list[dict[str, object]] = [{"rows": 5}, {"rows": []}, {}, {"rows": [{"text": "x"}], "more": 1}]
    for bad in bodies:
        assert programs.post("/programs/guess/batch", json=bad).status_code == 400


def test_a_row_is_read_as_the_body_of_a_single_call_is(programs: httpx2.Client) -> None:
    row = {"day": "2026-11-23", "point": [1, 2], "price": "0.10", "names": {"3": "c"}}
    alone = programs.post("/programs/typed", json=row)
    assert alone.json() == {"value": "2026 (1, 2.0) 0.10 {3: 'c'}"}
    rows = f'{{"rows": [{json.dumps(row)}, {json.dumps(row | {"point": [1]})}, {{"price": 1e999}}]}}'
    content = {"content-type": "application/json"}
    first, *wrong = programs.post("/programs/typed/batch", content=rows, headers=content).json()["results"]
    assert first == {"values": alone.json()}
    assert {one["error"]["type"] for one in wrong} == {"invalid_request_error"}


def test_what_a_program_returns_stands_in_the_description(programs: httpx2.Client) -> None:
    document = programs.get("/openapi.json").json()
    answer = document["paths"]["/programs/judge"]["post"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/judge_answer"}
    assert document["components"]["schemas"]["judge_answer"]["required"] == ["word"]
    assert "/programs/judge/batch" in document["paths"]
    described = Described(document)
    for path, body in (
        ("guess", {"text": "the "}),
        ("guess/batch", {"rows": [{"text": "the "}]}),
        ("total", {"numbers": [1]}),
        ("judge", {"text": "the"}),
        ("judge/batch", {"rows": [{"text": "the"}, {"text": "a" * 10_000}]}),
        ("breaks", {"how": "badly"}),
        ("fills", {"text": "the"}),
        ("fills/batch", {"rows": [{"text": "the", "times": 3}]}),
    ):
        described.check(programs.post(f"/programs/{path}", json=body))
    filled = document["components"]["schemas"]["fills_answer"]
    assert filled["required"] == ["schema", "_number", "more", "seen"], "what the body tells by itself"
    assert filled["properties"]["schema"]["enum"] == ["cat", "dog"]
    assert filled["properties"]["_number"]["type"] == "integer"
    assert filled["properties"]["more"]["items"] == {"type": "string"}
    answer = document["paths"]["/programs/guess"]["post"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/Variables"}, "it asks what it was given"
    page = programs.get("/docs").text
    assert "POST /programs/judge" in page
    assert "body: guess_parameters" in page
    assert "answer: judge_answer" in page
    shown = page.partition("body: ChatRequest")[2].partition("</details>")[0]
    assert "<code>ChatMessage</code>" in shown, "what a body is made of stands with it"
    assert "requests with this <code>rid</code>," in page, "a docstring's code is code"
    assert "<script" not in page
    assert programs.get("/docs", headers={"authorization": ""}).status_code == 401


def test_the_tokens_of_a_program_count_for_its_caller(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(tokens_per_minute=3))
    with serving(engine, config, [Endpoint(judge)]) as url, httpx2.Client(base_url=url, timeout=60) as client:
        assert client.post("/programs/judge", json={"text": "count me"}).status_code == 200
        assert client.post("/programs/judge", json={"text": "the"}).status_code == 429


def test_a_batch_counts_as_one_request_and_runs_as_many_sequences(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(requests_per_minute=1))
    rows = {"rows": [{"text": "the"}] * 3}
    with serving(engine, config, [Endpoint(guess)]) as url, httpx2.Client(base_url=url, timeout=60) as client:
        assert client.post("/programs/guess/batch", json=rows).status_code == 200
        refused = client.post("/programs/guess/batch", json=rows)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_programs_that_outlive_the_drain_are_told_and_cancelled(engine: Engine) -> None:
    config = ServerConfig(port=0, drain_seconds=0)
    answers: list[httpx2.Response] = []

    def ask(page: str, body: object) -> None:
        answers.append(httpx2.post(page, json=body, timeout=60))

    with held(engine):
        with serving(engine, config, [Endpoint(endless)]) as url:
            page = f"{url}/programs/endless"
            bodies: dict[str, object] = {page: {}, f"{page}?stream=true": {}, f"{page}/batch": {"rows": [{}]}}
            asking = [threading.Thread(target=ask, args=asked) for asked in bodies.items()]
            for thread in asking:
                thread.start()
            wait_until(lambda: "niwaki_sequences_in_flight 3.0" in httpx2.get(f"{url}/metrics").text)
        for thread in asking:
            thread.join()
    told: list[Any] = [answer.json() for answer in answers if answer.status_code == 503]
    told += [events_of(answer.text.splitlines())[-1] for answer in answers if answer.status_code == 200]
    assert [one["error"]["code"] for one in told] == ["overloaded"] * 3


def test_a_program_that_is_told_to_end_between_two_steps_makes_no_other(engine: Engine) -> None:
    async def steps() -> list[int]:
        run = _Run(engine.backend, Metrics(dict))
        done = [await run.result(lambda: asyncio.sleep(0, 1))]
        run.interrupt(EngineStopped("the server is shutting down"))
        with pytest.raises(EngineStopped):
            done.append(await run.result(lambda: asyncio.sleep(0, 2)))
        return done

    assert asyncio.run(steps()) == [1]


@pytest.mark.parametrize("path", ["endless", "endless/batch", "endless/batch?stream=true"])
def test_a_client_that_leaves_ends_its_program(programs: httpx2.Client, engine: Engine, path: str) -> None:
    before = engine.stats()["generated_tokens"]
    body: dict[str, object] = {"rows": [{}, {}, {"no": 1}]} if "batch" in path else {}
    with pytest.raises(httpx2.ReadTimeout):
        programs.post(f"/programs/{path}", json=body, timeout=httpx2.Timeout(60, read=0.3))
    wait_until(lambda: nobody_waits(programs))
    wait_until_idle(engine)
    assert engine.stats()["generated_tokens"] - before < 15_000


def test_what_cannot_be_served_is_refused_before_anything_runs() -> None:
    def untyped(s, text):  # type: ignore[no-untyped-def]  # that is the point
        s += text

    def many(s: State, *texts: str) -> None:
        s += texts[0]

    def opaque(s: State, thing: Iterator[int]) -> None:
        s += str(thing)

    with pytest.raises(nw.ConfigError, match="give its parameter text a type"):
        Endpoint(nw.function(untyped))
    for function in (many, opaque):
        with pytest.raises(nw.ConfigError, match="cannot be served"):
            Endpoint(nw.function(function))


def test_the_command_line_names_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    from niwaki.__main__ import main

    logger = logging.getLogger("niwaki")
    before = logger.handlers[:], logger.level, logger.propagate
    assert main(["serve", "--port", "0", "--program", f"{ROOT}/examples/extract.py:nothing"]) == 1
    assert "nothing is not defined" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--program", "extract"]) == 1
    assert "is not FILE.py:FUNCTION" in capsys.readouterr().err
    assert (logger.handlers, logger.level, logger.propagate) == before, "this stderr is closed behind the test"


@pytest.mark.parametrize("path", ["total", "total?stream=true", "total/batch", "total/batch?stream=true"])
def test_a_value_that_json_has_nothing_for_is_an_error_and_no_null(programs: httpx2.Client, path: str) -> None:
    body: dict[str, object] = {"numbers": [1e308, 1e308]}
    answer = programs.post(f"/programs/{path}", json={"rows": [body]} if "batch" in path else body)
    assert answer.status_code == (500 if path == "total" else 200)
    assert "error" in answer.text
    assert "null" not in answer.text.partition("message")[0]
    assert "total" not in answer.text
