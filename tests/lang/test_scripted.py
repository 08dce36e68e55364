"""The scripted backend answers as told, and holds a program to the rules that a real backend has."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

import niwaki as nw
from niwaki.lang.scripted_answers import Script
from niwaki.lang.state import State
from niwaki.runtime.api import Choices, Regex, SamplingParams, Segment
from tests.lang.waiting import PATIENCE


def generate(backend: nw.ScriptedBackend, prompt: str, params: SamplingParams | None = None) -> str:
    branch = backend.open()
    (output, *_) = backend.generate(branch, [Segment(prompt)], params or SamplingParams()).result(10)
    backend.close(branch)
    return output.text


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        ({"a": "1", "b": "2"}, ["1", "2", "1"]),
        ({re.compile("^x.*a"): "1", "b": "2", "a": "3"}, ["1", "2", "1"]),
        ({"a": ["1", "2"], "": "3"}, ["1", "3", "2"]),
        ({"": lambda prompt: prompt[-1] * 2}, ["aa", "bb", "aa"]),
        (["1", "2", "3"], ["1", "2", "3"]),
        (lambda prompt: prompt[::-1], ["ax", "bx", "ax"]),
    ],
)
def test_answers_come_by_ending_by_regex_in_order_or_from_a_function(script: Script, answers: list[str]) -> None:
    backend = nw.ScriptedBackend(script)
    assert [generate(backend, prompt) for prompt in ("xa", "xb", "xa")] == answers


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"never": "x"}, "no answer to a prompt that ends with 'prompt'; it knows: 'never'"),
        ([], "the script's 0 answers are used up; prompt"),
        ({"": lambda prompt: object()}, "must be a text, or have JSON, got <object"),
    ],
)
def test_a_prompt_without_an_answer_is_an_error(script: Script, message: str) -> None:
    with pytest.raises(nw.GenerationError, match=message):
        generate(nw.ScriptedBackend(script), "prompt")


def test_an_exception_as_an_answer_is_raised() -> None:
    with pytest.raises(nw.CapacityError, match="full"):
        generate(nw.ScriptedBackend({"": nw.CapacityError("full")}), "x")
    with pytest.raises(nw.CapacityError, match="full of x"):
        generate(nw.ScriptedBackend(lambda prompt: nw.CapacityError(f"full of {prompt}")), "x")


@pytest.mark.parametrize("script", ["text", 5, b"x"])
def test_what_is_no_script_is_refused(script: object) -> None:
    with pytest.raises(nw.ProgramError, match="a script is a mapping"):
        nw.ScriptedBackend(script)  # type: ignore[arg-type]  # that is the point


def test_a_key_that_ends_no_prompt_is_refused_where_the_script_is_written() -> None:
    with pytest.raises(nw.ProgramError, match=r"a script's key is the end of a prompt, .* got 5"):
        nw.ScriptedBackend({"a": "b", 5: "c"})  # type: ignore[dict-item]  # that is the point


def test_an_answer_that_its_constraint_excludes_is_an_error() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "blue")
    assert generate(backend, "x", SamplingParams(constraint=Regex("[a-z]+"))) == "blue"
    with pytest.raises(nw.ConstraintError, match="'blue' does not match the regex"):
        generate(backend, "x", SamplingParams(constraint=Regex("[a-d]+")))
    with pytest.raises(nw.ConstraintError, match="'blue' is none of the choices"):
        generate(backend, "x", SamplingParams(constraint=Choices(("red",))))
    with pytest.raises(nw.ConstraintError, match="'blue' is none of the choices"):
        backend.score(backend.open(), [Segment("x")], ["red"]).result(1)


def test_budgets_and_stops_cut_the_answer_as_a_real_backend_does() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "one two three, four")
    branch = backend.open()

    (cut,) = backend.generate(branch, [], SamplingParams(max_new_tokens=2)).result(1)
    assert (cut.text, cut.finish_reason.type, cut.completion_tokens, cut.complete) == ("one two", "length", 2, True)
    (cut,) = backend.generate(branch, [], SamplingParams(stop=("four", ","))).result(1)
    assert (cut.text, cut.finish_reason.matched) == ("one two three", ",")
    (cut,) = backend.generate(branch, [], SamplingParams(max_new_tokens=1, constraint=Regex(".*"))).result(1)
    assert not cut.complete


def test_it_counts_what_a_prefix_cache_would_save() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "two words")
    branch = backend.open()
    (first,) = backend.generate(branch, [Segment("three words here")], SamplingParams()).result(1)
    fork = backend.fork(branch)
    (second,) = backend.generate(fork, [Segment(" more")], SamplingParams()).result(1)
    assert (first.prompt_tokens, first.cached_tokens) == (3, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (6, 5)
    assert list(fork.token_ids)[:5] == list(branch.token_ids)
    assert backend.usage() == {"prefilled_tokens": 4.0, "cached_tokens": 5.0, "generated_tokens": 4.0}


def test_calls_are_kept_for_a_test_to_look_at() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "ok")

    @nw.function
    def f(s: State) -> None:
        s += "a" + nw.gen("x", temperature=0.5) + "b" + nw.select("y", choices=["ok", "no"])

    f.run(backend=backend).sync()
    assert [(call.kind, call.prompt) for call in backend.calls] == [("generate", "a"), ("score", "aokb")]


def test_several_samples_use_several_answers() -> None:
    backend = nw.ScriptedBackend(["a", "b", "c"])
    outputs = backend.generate(backend.open(), [], SamplingParams(n=3)).result(1)
    assert [output.text for output in outputs] == ["a", "b", "c"]


def test_log_probabilities_are_there_where_asked() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "a b")

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", return_logprob=True) + nw.gen("y")

    state = f.run(backend=backend)
    logprobs = state.get_meta_info("x")["output_token_logprobs"]
    assert isinstance(logprobs, list)
    assert [(value, text) for value, _, text in logprobs] == [(-0.1, "a"), (-0.1, " b")]
    assert "output_token_logprobs" not in state.get_meta_info("y")


def test_a_closed_branch_is_refused_and_closing_twice_is_allowed() -> None:
    backend = nw.ScriptedBackend()
    branch = backend.open()
    backend.close(branch)
    backend.close(branch)
    with pytest.raises(nw.ProgramError, match="closed"):
        backend.append(branch, [Segment("x")])


def test_closing_a_branch_cancels_what_runs_on_it() -> None:
    started = threading.Event()

    def answer(prompt: str) -> str:
        started.set()
        return "a b c " * 1000

    backend = nw.ScriptedBackend(answer, threads=1, delay=0.01)
    branch = backend.open()
    generation = backend.generate(branch, [], SamplingParams(max_new_tokens=10_000))
    assert started.wait(PATIENCE)
    backend.close(branch)
    with pytest.raises(nw.Cancelled):
        generation.result(PATIENCE)
    backend.shutdown()


def test_a_backend_that_was_shut_down_says_so() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "x", threads=1)
    backend.shutdown()
    with pytest.raises(nw.EngineStopped):
        generate(backend, "x")


def test_a_stream_tells_log_probabilities_where_they_were_asked_for() -> None:
    @nw.function
    async def tell(s: State) -> None:
        s += nw.gen("x", return_logprob=True)

    async def main() -> list[object]:
        state = tell.stream(backend=nw.ScriptedBackend(["one two three"]))
        return [info async for _, info in state.text_async_iter("x", return_meta_data=True)]

    told = asyncio.run(main())
    assert sum(len(info["output_token_logprobs"]) for info in told) == 3  # type: ignore[index,misc]


def test_no_stop_ends_a_scripted_answer_within_its_min_tokens() -> None:
    def told(least: int) -> str:
        params = SamplingParams(stop=("\n", "two\nt"), min_tokens=least)
        return generate(nw.ScriptedBackend(["one\ntwo\nthree\n"]), "", params)

    assert [told(least) for least in range(7)] == [
        "one",
        "one",
        "one\n",
        "one\n",
        "one\n",
        "one\ntwo\nthree",
        "one\ntwo\nthree\n",
    ]
