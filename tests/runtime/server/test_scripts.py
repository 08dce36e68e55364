"""A compiled program is one request to a server, gives what the program gives, and leaves nothing there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import httpx2
import pytest
from hypothesis import given, settings

import niwaki as nw
from niwaki.lang.backends import Host
from niwaki.lang.program import Program
from niwaki.lang.remote import RuntimeEndpoint
from niwaki.lang.remote_link import ServerLink
from niwaki.lang.remote_wire import params_json
from niwaki.lang.state import State
from niwaki.runtime.api import SamplingParams, Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from niwaki.runtime.link.frames import LaneEnded
from niwaki.runtime.link.lanes import QUICK_CHARS
from niwaki.runtime.server.errors import ServerEnds
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.scripts import Running, ScriptBody
from tests.lang.waiting import wait_until
from tests.plans import NAMES, follow, plans_of
from tests.runtime.server.conftest import held, nobody_waits, wait_until_idle

Told = dict[str, object]


@pytest.fixture(scope="module")
def endpoint(url: str) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(url) as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request that leaves this process, but those that close a branch when its state is dropped."""
    found: list[str] = []
    ask = ServerLink._ask

    def noted(self: ServerLink, method: str, path: str, *more: object) -> object:
        if method != "DELETE":
            found.append(f"{method} /{path.split('/')[1]}")
        return ask(self, method, path, *more)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(ServerLink, "_ask", noted)
    return found


def test_a_long_text_behind_a_call_is_not_tokenized_where_the_engine_steps(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = Tokenizer.encode, dict[str, str]()

    def noted(self: Tokenizer, segments: Sequence[Segment], *, at_start: bool = False) -> list[int]:
        threads["".join(segment.text for segment in segments)[:8]] = threading.current_thread().name
        return encode(self, segments, at_start=at_start)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    params = params_json(SamplingParams(max_new_tokens=2, temperature=0))
    calls = [{"do": "generate", "call": call, "params": params} for call in range(3)]
    long = "a longer text " * (QUICK_CHARS // 14 + 1)
    ops = [{"do": "say", "parts": ["the cat"]}, calls[0], {"do": "say", "parts": [" sat on it"]}, calls[1]]
    ops += [{"do": "say", "parts": [long]}, calls[2]]
    httpx2.post(f"{url}/scripts", json={"branches": [ops], "is_over": True}, timeout=60)
    assert threads[" sat on it"[:8]] == "niwaki-engine", "a short one is not handed over"
    assert threads[long[:8]] == "niwaki-tokenize"


def first_tokens(url: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("niwaki_time_to_first_token_seconds_count")))


@nw.function
def judge(s: State, question: str) -> str:
    s += nw.user(question)
    forks = s.fork(3)
    forks += lambda i: nw.assistant(f"As judge {i}: " + nw.gen("view", max_tokens=5))
    forks.join()
    s += nw.user("The judges said:\n" + "\n".join(s["view"]) + f"\nFirst: {s['view'][0]}")  # type: ignore[arg-type,index]
    s += nw.assistant(
        nw.select("word", choices=["yes", "no"], choices_method="exact") + nw.gen("verdict", max_tokens=6)
    )
    s += nw.user(nw.gen("score", dtype=int, max_tokens=4))
    return f"{s['verdict']} of {s['word']}"


@nw.function
def decide(s: State, question: str) -> None:
    s += question + nw.gen("a", max_tokens=5)
    forks = s.fork(2)
    forks += lambda i: f" {i} " + nw.gen("x", max_tokens=4)
    forks.join()
    if len(str(s["x"])) > 8:
        s += "long " + s["x"][1]  # type: ignore[index]  # a list of texts
    else:
        s += "short "
    s += nw.gen("b", max_tokens=4) + f" {s['a']} " + nw.gen("c", max_tokens=3)


def told(program: Program, backend: Host, names: list[str], *args: object) -> Told:
    state = program.run(*args, options={"backend": backend, "temperature": 0, "max_new_tokens": 4})
    values: Told = {name: state[name] for name in names if name in state}
    values |= {"text": state.text(), "ids": list(state.token_ids), "messages": state.messages()}
    return values | {"returned": state.ret_value, "completion": state.usage.generated_tokens}


VALUES = {"judge": ["view", "word", "verdict", "score"], "decide": ["a", "x", "b", "c"]}


def test_a_whole_program_is_one_request(endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]) -> None:
    expected = told(judge, engine, VALUES["judge"], "Why the cat?")
    assert told(judge, endpoint, VALUES["judge"], "Why the cat?") == expected
    assert len(asked) > 8, "call by call"
    told(judge.compile(), endpoint, VALUES["judge"], "Why a dog?")  # asks for the chat template, once
    asked.clear()
    assert told(judge.compile(), endpoint, VALUES["judge"], "Why the cat?") == expected
    assert asked == ["POST /scripts"], "its values, its text and its tokens came with the answer"


@nw.function
def count(s: State, question: str) -> int:
    s += question + nw.gen("a", max_tokens=5) + " So: " + nw.gen("n", dtype=int, max_tokens=4)
    forks = s.fork(2)
    forks += lambda i: f" {i} " + nw.gen("x", max_tokens=3)
    return s.get_var("n", int) + len(forks[1].get_var("x", str))


def test_a_typed_read_in_a_return_comes_with_the_answer(
    endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]
) -> None:
    expected = told(count, engine, ["a", "n"], "Why the cat?")
    assert count.for_rows().is_compiled, "a batch compiles it by itself"
    told(count.compile(), endpoint, ["a"], "Why a dog?")  # asks for what the server is, once
    asked.clear()
    assert told(count.compile(), endpoint, ["a", "n"], "Why the cat?") == expected
    assert asked == ["POST /scripts"]


@nw.function
def goes_deeper(s: State, depth: int) -> str:
    s += f"The cat at {depth} " + nw.gen(f"x{depth}", max_tokens=4)
    if depth:
        goes_deeper(s, depth - 1)
        s += " then " + nw.gen(f"y{depth}", max_tokens=4)
    return s.get_var(f"x{depth}", str)


def test_the_return_of_a_part_that_is_the_program_itself_is_no_end(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    """Text behind it would be read on a branch of its own, where broken characters are other tokens."""
    names = ["x0", "x1", "x2", "y1", "y2"]
    expected = told(goes_deeper, engine, names, 2)
    for backend in (engine, endpoint):
        assert told(goes_deeper, backend, names, 2) == expected
        assert told(goes_deeper.compile(), backend, names, 2) == expected


def test_metrics_count_each_generation_of_a_script(endpoint: RuntimeEndpoint, url: str) -> None:
    before = first_tokens(url)
    judge.compile().run(question="Why the cat?", options={"backend": endpoint}).text()
    assert first_tokens(url) - before == 5


def test_a_decision_hands_over_with_the_state_as_it_is(
    endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]
) -> None:
    expected = told(decide, engine, VALUES["decide"], "the cat ")
    asked.clear()
    assert told(decide.compile(), endpoint, VALUES["decide"], "the cat ") == expected
    assert asked == ["POST /scripts", "POST /branches", "POST /branches", "GET /branches"], "then call by call"
    wait_until_idle(engine)


@settings(max_examples=10)
@given(plan=plans_of("select", "value"))
def test_random_programs_give_the_same_on_an_engine_compiled_and_on_a_server(
    plan: list[tuple[str, object]], endpoint: RuntimeEndpoint, engine: Engine
) -> None:
    names = [*NAMES, "inner", "turn", "each"]
    decided: list[list[str]] = [[], [], []]
    plain = told(follow, engine, names, plan, decided[0])
    assert told(follow.compile(), engine, names, plan, decided[1]) == plain
    assert told(follow.compile(), endpoint, names, plan, decided[2]) == plain
    assert decided[1:] == decided[:1] * 2, "the body ran once, and decided by the same values"


def test_text_behind_the_end_of_a_script_goes_on_like_that_behind_a_released_state(
    endpoint: RuntimeEndpoint, engine: Engine
) -> None:
    """On a branch of its own, to which the text so far is sent again."""

    @nw.function
    def short(s: State) -> None:
        s += "the cat " + nw.gen("x", regex="[a-z]{3}")

    def longer(program: Program, backend: Host) -> str:
        state = program.run(options={"backend": backend, "temperature": 0})
        state.sync()
        state._executor.release()
        state += " and the dog " + nw.gen("y", regex="[a-z]{3}")
        return state.text()

    expected = longer(short, engine)
    assert longer(short.compile(), endpoint) == expected
    state = short.compile().run(options={"backend": endpoint, "temperature": 0})
    state += " and the dog " + nw.gen("y", regex="[a-z]{3}")
    assert state.text() == expected


def test_a_call_that_fails_fails_its_state_as_without_a_script(endpoint: RuntimeEndpoint) -> None:
    @nw.function
    def broken(s: State, pattern: str) -> None:
        s += "the cat " + nw.gen("a", max_tokens=3)
        forks = s.fork(2)
        forks[0] += nw.gen("x", max_tokens=3)
        forks[1] += nw.gen("x", regex=pattern, max_tokens=3)
        forks.join()
        s += nw.gen("end", max_tokens=3)

    for program in (broken, broken.compile()):
        state = program.run("(a|b)*a(a|b){20}", backend=endpoint)
        assert isinstance(state["a"], str)
        with pytest.raises(nw.ConstraintError, match="too complex"):
            state["end"]


def test_what_a_server_takes_no_script_of_is_interpreted(
    endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]
) -> None:
    class Last:
        needs_unconditional = False

        def decide(self, scores: object, unconditional: object = ()) -> object:
            from niwaki.runtime.api.choices import Decision

            return Decision(len(scores) - 1, {})  # type: ignore[arg-type]  # a sequence

    @nw.function
    def own_method(s: State) -> None:
        s += "the cat " + nw.gen("a", max_tokens=3)
        s += nw.select("b", choices=["x", "y"], choices_method=Last())  # type: ignore[arg-type]  # a method
        s += nw.gen("c", max_tokens=3)

    assert told(own_method.compile(), endpoint, ["a", "b", "c"]) == told(own_method, engine, ["a", "b", "c"])
    assert asked[0] == "POST /scripts"
    assert len(asked) > 3, "what follows the method of the author's own is asked call by call"


def test_a_thousand_choices_are_one_request(endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]) -> None:
    choices = [f" number {n}" for n in range(1000)]  # many of them begin others

    @nw.function
    def pick(s: State, text: str) -> None:
        s += text + nw.select("x", choices=choices, choices_method="exact")

    chosen = pick.run("the cat 1 2 3 ", backend=engine)["x"]
    assert pick.run("the cat 1 2 3 ", backend=endpoint)["x"] == chosen
    assert asked == ["POST /branches", "POST /branches"], "to open one, and to score on it"
    asked.clear()
    meta = pick.compile().run("the cat 1 2 3 ", backend=endpoint).get_meta_info("x")
    probabilities = meta["probabilities"]
    assert isinstance(probabilities, list)
    assert choices[probabilities.index(max(probabilities))] == chosen
    assert (len(probabilities), asked) == (1000, ["POST /scripts"])


@pytest.mark.parametrize("seed", [None, 3])
def test_values_are_drawn_alike_on_both_sides(
    seed: int | None, endpoint: RuntimeEndpoint, engine: Engine, asked: list[str]
) -> None:
    @nw.function
    def guess(s: State) -> None:
        s += "the cat " + nw.gen("x", dtype=Literal["sat", "ran", "saw", "is"])
        s += f" {s['x']}"

    def run(backend: Host) -> State:
        return guess.compile().run(options={"backend": backend, "seed": seed, "temperature": 2.0})

    run(endpoint)  # asks for the chat template, once
    asked.clear()
    states = [run(endpoint) for _ in range(10)]
    for state in states:
        assert engine.tokenizer.decode(state.token_ids) == state.text(), "tokens are written there, the text here"
    assert set(asked) == {"POST /scripts"}
    if seed is not None:
        assert {state["x"] for state in states} == {run(engine)["x"]}


def test_cancelling_here_ends_the_script_there(
    endpoint: RuntimeEndpoint, client: httpx2.Client, engine: Engine
) -> None:
    @nw.function
    def wide(s: State) -> None:
        s += "the cat "
        forks = s.fork(3)
        forks += nw.gen("x", max_tokens=400, ignore_eos=True)
        forks.join()
        s += nw.gen("y", max_tokens=40)

    before = engine.stats()["generated_tokens"]
    with held(engine):
        state = wide.compile().run(backend=endpoint)
        wait_until(lambda: bool(engine.stats()["requests_running"]))
        state.cancel()
        with pytest.raises(nw.Cancelled):
            state["y"]
        del state
        wait_until(lambda: nobody_waits(client))  # the server hears of it later than we do
    wait_until_idle(engine)
    assert engine.stats()["generated_tokens"] - before < 100, "it was not waited for"


def test_a_body_that_waits_on_a_thread_of_its_own_does_not_hang(endpoint: RuntimeEndpoint) -> None:
    @nw.function
    def threaded(s: State, found: list[object]) -> None:
        s += "the cat " + nw.gen("x", max_tokens=3)
        thread = threading.Thread(target=lambda: found.append(s["x"]))
        thread.start()
        thread.join()
        s += nw.gen("y", max_tokens=3)

    found: list[object] = []
    state = threaded.compile().run(found, backend=endpoint)
    assert found == [state["x"]]
    assert isinstance(state["y"], str)


SAY: Told = {"do": "say", "parts": ["the cat"]}


@pytest.mark.parametrize(
    ("branches", "said"),
    [
        ([[SAY], [SAY]], "split off once"),
        ([[{"do": "split", "branch": 1}, {"do": "split", "branch": 1}], []], "split off once"),
        ([[{"do": "split", "branch": 0}]], "split off once"),
        ([[{"do": "choose", "call": 0, "choices": ["a"], "method": "best"}]], "method"),
        ([[{"do": "choose", "call": 0, "choices": ["a"], "method": "exact"}] * 2], "number of its own"),
        ([[{"do": "say", "parts": [-1]}]], "greater than or equal"),
        ([], "at least 1"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(client: httpx2.Client, branches: list[object], said: str) -> None:
    answer = client.post("/scripts", json={"branches": branches, "is_over": True})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_text_that_never_comes_ends_the_script_and_hangs_nobody(client: httpx2.Client, engine: Engine) -> None:
    choose = {"do": "choose", "call": 0, "choices": ["a", "b"], "method": "exact"}
    answer = client.post("/scripts", json={"branches": [[{"do": "say", "parts": [0]}, choose]], "is_over": True})
    assert answer.text == 'data: {"token_ids":null}\n\n'


def test_of_a_script_that_is_told_to_end_no_branch_is_handed_over() -> None:
    """Its lanes that are at their end went with it."""

    async def told() -> list[object]:
        running = Running(ScriptBody(branches=[[]], is_over=False), Metrics(dict))
        running._hear({}, LaneEnded(1, 0, b"", 0, 0))
        running.interrupt(ServerEnds("the server is shutting down"))
        return [one async for one in running.news()]

    (error,) = asyncio.run(told())
    assert isinstance(error, dict)
    assert error["error"]["code"] == "overloaded"
