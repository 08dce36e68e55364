"""The language on a real engine: whatever the model says, branches, types, streams and errors hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.lang.tools import Call
from niwaki.runtime.api import Segment
from tests.lang.waiting import wait_until
from tests.toy import make_model

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine


@pytest.fixture
def engine(bundled_engine: Engine) -> Iterator[Engine]:
    """The bundled model as the default backend. Afterwards no branch of any state may be left."""
    nw.set_default_backend(bundled_engine)
    yield bundled_engine
    nw.set_default_backend(None)
    wait_until(lambda: not bundled_engine.stats()["pages_held"])
    bundled_engine.backend.check()


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int | None = pydantic.Field(ge=0, le=120)
    mood: Literal["good", "bad"]


@nw.function
def interview(s: State, text: str) -> None:
    s += nw.system("You extract facts as JSON.")
    s += nw.user(text)
    s += nw.assistant(nw.gen("person", dtype=Person))
    forks = s.fork(4)
    forks += nw.user("And the year?")
    forks += nw.assistant(nw.gen("year", regex="(19|20)[0-9]{2}"))
    forks.join()
    s += nw.user("Positive or negative?")
    s += nw.assistant(nw.select("label", choices=["positive", "negative"]))
    s += " " + nw.gen_int("number") + nw.gen("free", max_tokens=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_value_is_of_its_type_whatever_the_model_says(engine: Engine, temperature: float) -> None:
    state = interview.run("Ada is 36.", temperature=temperature, max_new_tokens=40)
    assert isinstance(state["person"], Person)
    assert isinstance(state["number"], int)
    assert state["label"] in ("positive", "negative")
    years = state["year"]
    assert isinstance(years, list)
    assert [bool(re.fullmatch("(19|20)[0-9]{2}", str(year))) for year in years] == [True] * 4
    assert isinstance(state["free"], str)


class Card(pydantic.BaseModel):
    name: str
    city: str


TEXT = "Hi, I'm Lena Fischer, a nurse from Dresden.\n\nFields: name, city"


# The second is a grammar, as its depth has no bound; the first an automaton, which knows all tokens that fit at once.
NESTED = {
    "$ref": "#/$defs/card",
    "$defs": {
        "card": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "more": {"$ref": "#/$defs/card"}},
            "required": ["name", "city"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("kind", [{"dtype": Card}, {"json_schema": NESTED}], ids=["automaton", "grammar"])
def test_a_value_that_its_budget_made_shorter_says_so(
    engine: Engine, kind: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())

    @nw.function
    def card(s: State, most: int) -> None:
        s += nw.user(TEXT)
        s += nw.assistant(nw.gen("card", temperature=0, max_tokens=most, **kind))

    whole = card.run(120)
    info = whole.get_meta_info("card")
    needed = info["completion_tokens"]
    assert (info["finish_reason"]["type"], info["complete"]) == ("stop", True)
    assert card.run(needed)["card"] == whole["card"]
    assert card.run(needed).get_meta_info("card")["finish_reason"]["type"] == "stop", "it needs no more"
    assert caplog.records == []
    for less in (1, 2, 3):
        cut = card.run(needed - less)
        assert cut["card"] != whole["card"]
        info = cut.get_meta_info("card")
        assert (info["finish_reason"]["type"], info["complete"]) == ("length", True)
        assert (whole.shortened, cut.shortened) == ((), ("card",))
    (told,) = caplog.messages
    assert "gen 'card' came to the end of its" in told
    assert "give it a larger max_tokens" in told
    assert "test_on_engine.py" in told


@pytest.mark.parametrize(
    "kind",
    [{"regex": "[0-9]{9}"}, {"json_schema": NESTED}, {"grammar": 'start: "a long word"'}],
    ids=lambda kind: min(kind),
)
def test_a_text_that_its_budget_cut_off_says_so(
    engine: Engine, kind: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())

    @nw.function
    def cut(s: State) -> None:
        s += TEXT + nw.gen("cut", max_tokens=2, **kind)

    assert [cut.run().get_meta_info("cut")["complete"] for _ in range(2)] == [False, False]
    (told,) = caplog.messages
    assert f"gen 'cut' used up its 2 tokens before its text satisfied the {min(kind)}" in told


def look_up(name: str) -> str:
    """Looks up a person."""
    return name


def test_a_call_that_its_budget_made_shorter_says_so(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())

    @nw.function
    def ask(s: State, most: int) -> None:
        s += nw.system("You can call tools.", tools=[look_up])
        s += nw.user("Where does Jonas Weberling live?")
        s += nw.assistant(nw.gen("call", tools=[look_up], tool_choice="required", temperature=0, max_tokens=most))

    whole = ask.run(60)
    needed = whole.get_meta_info("call")["completion_tokens"]
    assert whole.get_var("call", Call).arguments == {"name": "Jonas Weberling"}
    assert caplog.records == []
    for less in (2, 3):
        cut = ask.run(needed - less)
        assert len(str(cut.get_var("call", Call).arguments["name"])) < len("Jonas Weberling")
        assert cut.get_meta_info("call")["finish_reason"]["type"] == "length"
        assert (whole.shortened, cut.shortened) == ((), ("call",))
    (told,) = caplog.messages
    assert "its call is valid, and may be shorter" in told


def test_forks_prefill_their_prefix_once(engine: Engine) -> None:
    words = " ".join(f"unseen{i}" for i in range(150))
    counts = []
    for n in (1, 8):
        nw.flush_cache()
        before = engine.stats()["prefilled_tokens"]

        @nw.function
        def f(s: State, n: int) -> None:
            s += words
            forks = s.fork(n)
            forks += "\nNext:" + nw.gen("x", max_tokens=2, temperature=0)
            forks.join()
            s.sync()

        f.run(n)
        counts.append(engine.stats()["prefilled_tokens"] - before)
    own = len(engine.tokenizer.encode([Segment("\nNext:")]))
    assert counts[1] - counts[0] <= 7 * (own + 1)


def test_what_a_program_generates_is_what_the_engine_generates_from_the_same_tokens(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "The list: one, two," + nw.gen("x", max_tokens=12, temperature=0)

    state = f.run()
    direct = engine.generate("The list: one, two,", {"max_new_tokens": 12, "temperature": 0})
    assert isinstance(direct, dict)
    assert state["x"] == direct["text"]


def test_later_calls_find_their_whole_past_in_the_cache(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "A story about a tree that grew near the old river."
        for i in range(4):
            s += f"\n{i}:" + nw.gen(f"x{i}", max_tokens=8, temperature=0, ignore_eos=True)

    state = f.run()
    for i in range(1, 4):
        meta = state.get_meta_info(f"x{i}")
        prompt, cached = meta["prompt_tokens"], meta["cached_tokens"]
        assert isinstance(prompt, int)
        assert isinstance(cached, int)
        # New are the step's own text and the token sampled last, which no step has been run on yet.
        assert prompt - cached <= len(engine.tokenizer.encode([Segment(f"\n{i}:")])) + 1


def test_the_pieces_of_a_stream_add_up(engine: Engine) -> None:
    state = interview.stream("Bob is 7.", max_new_tokens=30, temperature=1.0, seed=3)
    name_pieces = "".join(state.text_iter("person"))
    assert "".join(state.text_iter()) == state.text()
    assert name_pieces in state.text()


def test_a_batch_runs_on_one_engine(engine: Engine) -> None:
    results = interview.run_batch([(f"Person {i}",) for i in range(6)], max_new_tokens=30, temperature=1.0)
    assert [type(result) for result in results] == [State] * 6


def test_an_impossible_length_is_refused_with_the_line(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "word " * 50_000
        s += nw.gen("x")

    error = f.run().error()
    assert isinstance(error, nw.CapacityError)
    assert 's += nw.gen("x")' in error.__notes__[0]


def test_a_regex_outside_the_engines_dialect_is_refused_with_the_line(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", regex=r"(a)\1")

    error = f.run().error()
    assert isinstance(error, nw.ConstraintError)
    assert "in program f, test_on_engine.py" in error.__notes__[0]


def test_a_time_out_stops_the_engine_too(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", max_tokens=3000, ignore_eos=True)

    state = f.run(timeout=0.2)
    with pytest.raises(nw.TimedOut):
        state["x"]
    wait_until(lambda: engine.stats()["requests_running"] == 0)


def test_log_probabilities_of_the_text_before_are_told_where_asked_for(engine: Engine) -> None:
    @nw.function
    def told(s: State, start: int) -> None:
        s += "The cat sat on the" + nw.gen("x", max_tokens=2, return_logprob=True, logprob_start_len=start)

    ids = engine.tokenizer.encode([Segment("The cat sat on the")], at_start=True)
    metas = [dict[str, Any](told.run(start).get_meta_info("x")) for start in (0, len(ids) - 1)]
    whole, last = (meta["input_token_logprobs"] for meta in metas)
    assert [entry[1] for entry in whole] == ids
    assert [entry[1] for entry in last] == ids[-1:]
    assert last[0][0] == pytest.approx(whole[-1][0], abs=0.3)  # bfloat16, by way of other shapes
    with pytest.raises(nw.RequestError, match="logprob_start_len 99 is behind the end"):
        told.run(99)["x"]


def test_an_engine_under_sglangs_name_runs_programs(tmp_path: Path) -> None:
    with nw.Runtime(model_path=make_model(tmp_path / "toy"), kv_tokens=1024) as runtime:
        nw.set_default_backend(runtime)
        try:
            assert len(str(ask.run("the cat ", temperature=0)["x"])) == 3
        finally:
            nw.set_default_backend(None)


@nw.function
def ask(s: State, text: str) -> None:
    s += text + nw.gen("x", regex="[a-z]{3}")


def test_a_validator_that_waits_for_the_engine_is_refused_and_holds_nobody_up(engine: Engine) -> None:
    """It runs where the engine tells its results: that waited for itself, and with it everybody's requests."""

    @nw.function
    def judge(s: State) -> None:
        s += "good? " + nw.gen("word", max_tokens=2)

    def by_program(age: int) -> int:
        judge.run(backend=engine).sync()
        return age

    def by_engine(age: int) -> int:
        engine.generate("good? ", {"max_new_tokens": 2})
        return age

    for check, message in ((by_program, "cannot wait for program judge"), (by_engine, "cannot wait for the engine")):
        checked = pydantic.create_model("checked", age=(Annotated[int, pydantic.AfterValidator(check)], ...))

        @nw.function
        def ask(s: State, kind: type) -> None:
            s += "Ada is 36: " + nw.gen("person", dtype=kind, max_tokens=40)

        with pytest.raises(nw.GenerationError, match=message):
            ask.run(checked).sync()
    assert judge.run()["word"] is not None
