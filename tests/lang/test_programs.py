"""Programs: what a call takes, where options come from, and what a run gives back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.program import Program
from niwaki.lang.scripted import Call
from niwaki.lang.state import State
from niwaki.runtime.api import SamplingOptions, SamplingParams

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def backend() -> Iterator[nw.ScriptedBackend]:
    """Answers "ok" to everything, and is the default."""
    scripted = nw.ScriptedBackend(lambda prompt: "ok")
    nw.set_default_backend(scripted)
    yield scripted
    nw.set_default_backend(None)


@nw.function
def greet(s: State, name: str, greeting: str = "Hello") -> object:
    s += f"{greeting} {name}: " + nw.gen("answer")
    return s["answer"]


def params_of(call: Call) -> SamplingParams:
    assert call.params is not None
    return call.params


def test_a_program_runs_and_its_variables_can_be_read(backend: nw.ScriptedBackend) -> None:
    state = greet.run("Ada")
    assert state["answer"] == "ok"
    assert state.text() == str(state) == "Hello Ada: ok"
    assert state.ret_value == "ok"


def test_calling_a_program_runs_it(backend: nw.ScriptedBackend) -> None:
    assert greet("Ada", greeting="Hi").text() == "Hi Ada: ok"


def test_a_program_keeps_the_name_and_docstring_of_its_function() -> None:
    @nw.function
    def documented(s: State) -> None:
        """Says so."""

    assert (documented.name, documented.__doc__) == ("documented", "Says so.")
    assert "documented" in repr(documented)


def test_the_state_may_have_any_name(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def f(anything: State, s: str) -> None:
        anything += s

    assert f.run(s="x").text() == "x"


def test_options_of_gen_stand_over_those_of_run_over_those_of_the_model_over_the_defaults() -> None:
    backend = nw.ScriptedBackend(
        lambda prompt: "ok", defaults=SamplingOptions(temperature=0.1, top_p=0.2, top_k=3, min_p=0.4)
    )

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", temperature=0.7)

    f.run(backend=backend, temperature=0.5, top_p=0.6).sync()
    expected = replace(SamplingParams(), temperature=0.7, top_p=0.6, top_k=3, min_p=0.4, heal=True)
    assert params_of(backend.calls[0]) == expected


def test_max_tokens_is_another_spelling_of_max_new_tokens(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", max_tokens=7) + nw.gen("y", max_new_tokens=8)

    f.run().sync()
    assert [params_of(call).max_new_tokens for call in backend.calls] == [7, 8]


def test_a_parameter_with_an_options_name_gets_the_value_and_the_option_goes_into_options(
    backend: nw.ScriptedBackend,
) -> None:
    @nw.function
    def f(s: State, stop: str, timeout: str) -> None:
        s += stop + timeout + nw.gen("x")

    state = f.run(stop="a", timeout="b", options={"stop": "z", "seed": 5})
    assert state.text() == "abok"
    assert (params_of(backend.calls[0]).stop, params_of(backend.calls[0]).seed) == (("z",), 5)


def test_options_may_be_given_as_sampling_options(backend: nw.ScriptedBackend) -> None:
    greet.run("Ada", options=SamplingOptions(temperature=0.25)).sync()
    assert params_of(backend.calls[0]).temperature == 0.25


def test_bound_arguments_and_options_are_defaults_that_a_call_overrides(backend: nw.ScriptedBackend) -> None:
    polite = greet.bind(greeting="Good day", temperature=0.5)
    assert polite.run("Ada").text() == "Good day Ada: ok"
    assert polite.run("Ada", greeting="Hi", temperature=0.25).text() == "Hi Ada: ok"
    assert polite.bind(name="Bob").run().text() == "Good day Bob: ok"
    assert polite.run("Ada", "Hey").text() == "Hey Ada: ok"
    assert [params_of(call).temperature for call in backend.calls] == [0.5, 0.25, 0.5, 0.5]


def test_a_program_inside_another_shares_its_backend_and_options(backend: nw.ScriptedBackend) -> None:
    other = nw.ScriptedBackend(lambda prompt: "other")

    @nw.function
    def outer(s: State) -> object:
        return greet.run("Ada")["answer"]

    assert outer.run(backend=other, temperature=0.5).ret_value == "other"
    assert params_of(other.calls[0]).temperature == 0.5
    assert backend.calls == []


def test_the_state_of_a_finished_run_can_be_continued(backend: nw.ScriptedBackend) -> None:
    state = greet.run("Ada")
    state += " and " + nw.gen("more")
    assert state["more"] == "ok"
    assert state.text() == "Hello Ada: ok and ok"


def test_text_alone_needs_no_backend() -> None:
    def fail(prompt: str) -> str:
        raise AssertionError("called")

    @nw.function
    def f(s: State) -> None:
        s += "a"
        s += ["b", ("c",)]
        s["x"] = 1

    state = f.run(backend=nw.ScriptedBackend(fail))
    assert (state.text(), state["x"]) == ("abc", 1)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_gives_states_in_the_order_of_its_rows(backend: nw.ScriptedBackend) -> None:
    rows = [{"name": f"n{i}"} for i in range(50)]
    states = greet.run_batch(rows, num_threads=8)
    assert [str(state) for state in states] == [f"Hello n{i}: ok" for i in range(50)]


def test_a_row_may_be_a_tuple_of_arguments(backend: nw.ScriptedBackend) -> None:
    assert [str(state) for state in greet.run_batch([("Ada", "Hi"), ("Bob",)])] == ["Hi Ada: ok", "Hello Bob: ok"]


def test_an_empty_batch_gives_an_empty_list(backend: nw.ScriptedBackend) -> None:
    assert greet.run_batch([]) == []


def test_a_failed_row_is_its_exception_and_the_others_go_on(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State, x: int) -> None:
        s += nw.gen("y")
        if x == 1:
            raise ValueError("one is not liked")

    results = f.run_batch([{"x": 0}, {"x": 1}, {"x": 2}])
    assert [isinstance(result, State) for result in results] == [True, False, True]
    assert isinstance(results[1], ValueError)


def test_a_backends_failure_is_also_the_exception_of_its_row() -> None:
    backend = nw.ScriptedBackend({"bad": nw.GenerationError("broken"), "": "ok"})

    @nw.function
    def f(s: State, x: str) -> None:
        s += x + nw.gen("y")

    results = f.run_batch([("good",), ("bad",)], backend=backend)
    assert isinstance(results[0], State)
    assert isinstance(results[1], nw.GenerationError)


def test_a_batch_can_raise_the_first_error_instead(backend: nw.ScriptedBackend) -> None:
    with pytest.raises(nw.ProgramError, match=r"no parameter 'nane'.*did you mean 'name'"):
        greet.run_batch([{"nane": "Ada"}], on_error="raise")


def test_a_generator_style_batch_yields_as_it_goes(backend: nw.ScriptedBackend) -> None:
    results = greet.run_batch(({"name": str(i)} for i in range(3)), generator_style=True)
    assert isinstance(results, Iterator)
    assert [str(state) for state in results] == ["Hello 0: ok", "Hello 1: ok", "Hello 2: ok"]


def test_options_of_a_batch_hold_for_every_row(backend: nw.ScriptedBackend) -> None:
    greet.run_batch([("a",), ("b",)], temperature=0.5)
    assert [params_of(call).temperature for call in backend.calls] == [0.5, 0.5]


def test_a_row_may_not_say_options_of_the_whole_batch(backend: nw.ScriptedBackend) -> None:
    rows: list[dict[str, object]] = [{"name": "Ada", "options": {"seed": 3}}, {"name": "Bo", "seed": 3}]
    of_async = asyncio.run(_all(greet.arun_batch(rows)))
    for results in (list(greet.run_batch(rows)), of_async):
        assert isinstance(results[0], nw.ProgramError)
        assert "options are of the whole batch" in str(results[0])
        assert str(results[1]) == "Hello Bo: ok"
    assert {params_of(call).seed for call in backend.calls} == {3}


async def _all(results: AsyncIterable[object]) -> list[object]:
    return [each async for each in results]


def test_a_finished_row_holds_no_branch_and_can_still_be_continued(backend: nw.ScriptedBackend) -> None:
    states = greet.run_batch([("Ada",)] * 4, num_threads=2)
    wait_for_no_branches(backend)
    state = states[0]
    assert isinstance(state, State)
    state += " " + nw.gen("again")
    assert state["again"] == "ok"
    assert backend.calls[-1].prompt == "Hello Ada: ok "


# -- branches ---------------------------------------------------------------------------------------------------------


def test_a_state_that_nobody_holds_gives_its_branch_back(backend: nw.ScriptedBackend) -> None:
    state = greet.run("Ada")
    assert backend.num_open_branches == 1
    del state
    wait_for_no_branches(backend)


def test_text_is_sent_once(backend: nw.ScriptedBackend) -> None:
    """Each call prefills what is new since the last one, and nothing twice."""

    @nw.function
    def f(s: State) -> None:
        for i in range(5):
            s += f"step {i}: " + nw.gen(f"x{i}")

    state = f.run()
    state.sync()
    assert backend.usage()["prefilled_tokens"] == len(state.token_ids) - 5  # the five answers came from generating


def test_the_pieces_of_a_text_are_one_text_to_the_backend(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "Hel"
        s += "lo wor"
        s += "ld" + nw.gen("x")

    @nw.function
    def g(s: State) -> None:
        s += "Hello world" + nw.gen("x")

    assert list(f.run().token_ids) == list(g.run().token_ids)


# -- misuse -----------------------------------------------------------------------------------------------------------


def no_state() -> None: ...


def only_keywords(*, s: State) -> None: ...


def any_arguments(*args: object) -> None: ...


def takes_options(s: State, options: object) -> None: ...


def generator(s: State) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (no_state, "needs the state as its first parameter"),
        (only_keywords, "needs the state as its first parameter"),
        (any_arguments, "needs the state as its first parameter"),
        (takes_options, "may not be called 'options'"),
        (generator, "must be a def or an async def without yield"),
        (3, "goes above a def"),
        (dict, "goes above a def, got <class 'dict'>"),
        (max, "goes above a def, got <built-in function max>"),
    ],
)
def test_what_cannot_be_a_program_is_refused_where_it_is_defined(func: object, message: str) -> None:
    with pytest.raises(nw.ProgramError, match=message):
        nw.function(func)  # type: ignore[call-overload]  # that is the point


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'name'"),
        (("a", "b", "c"), {}, "too many positional arguments"),
        (("a",), {"name": "b"}, "multiple values for argument 'name'"),
        (("a",), {"greetin": "b"}, "no parameter 'greetin'.*did you mean 'greeting'"),
        (("a",), {"temprature": 0}, "did you mean 'temperature'"),
        (("a",), {"options": {"temprature": 0}}, "did you mean 'temperature'"),
        (("a",), {"options": 3}, "options must be a mapping"),
        (("a",), {"timeout": -1}, "timeout must be a number of seconds"),
        (("a",), {"stream": "yes"}, "stream must be True or False"),
        (("a",), {"regex": "a+"}, "no parameter 'regex'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    backend: nw.ScriptedBackend, args: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(nw.ProgramError, match=message):
        greet.run(*args, **kwargs)
    assert backend.calls == []


def test_a_sampling_option_out_of_bounds_is_refused_before_the_body(backend: nw.ScriptedBackend) -> None:
    with pytest.raises(nw.RequestError, match="temperature must be a number from 0"):
        greet.run("Ada", temperature=-1)
    with pytest.raises(nw.RequestError, match="top_p"):
        greet.run_batch([("Ada",)], top_p=2)
    assert backend.calls == []


def test_an_unknown_name_cannot_be_bound() -> None:
    with pytest.raises(nw.ProgramError, match="no parameter 'nmae'"):
        greet.bind(nmae="x")


def test_what_is_no_backend_is_refused(backend: nw.ScriptedBackend) -> None:
    with pytest.raises(nw.ConfigError, match="is no backend"):
        greet.run("Ada", backend="http://nowhere")  # type: ignore[arg-type]
    with pytest.raises(nw.ConfigError, match="is no backend"):
        nw.set_default_backend("http://nowhere")  # type: ignore[arg-type]  # that is the point


def test_a_batch_cannot_stream(backend: nw.ScriptedBackend) -> None:
    with pytest.raises(nw.ProgramError, match="cannot stream"):
        greet.run_batch([("Ada",)], stream=True)


def test_the_default_backend_answers_for_itself(backend: nw.ScriptedBackend) -> None:
    greet.run("Ada").sync()
    assert nw.get_server_info()["model"] == "scripted"
    assert nw.flush_cache() is True


def test_another_backend_answers_where_it_is_named(backend: nw.ScriptedBackend) -> None:
    """As in SGLang."""

    class Busy(nw.ScriptedBackend):
        def flush_cache(self) -> bool:
            return False

    busy = Busy([])
    assert nw.flush_cache(busy) is nw.flush_cache(backend=busy) is False
    assert nw.get_server_info(busy) == busy.get_server_info()
    with pytest.raises(nw.UnsupportedByBackend, match="OpenAI has no flush_cache and no get_server_info"):
        nw.flush_cache(nw.OpenAI("gpt", api_key="-"))


def wait_for_no_branches(backend: nw.ScriptedBackend) -> None:
    """Branches are closed by a thread that sleeps until there is one."""
    import gc
    import time

    deadline = time.monotonic() + 60
    while backend.num_open_branches and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert backend.num_open_branches == 0


def test_program_is_the_type_of_a_program() -> None:
    assert isinstance(greet, Program)


def test_the_end_of_the_process_waits_for_branches_that_are_being_closed() -> None:
    """A thread that is killed while it frees an engine's tensors aborts the process."""
    code = """
import sys, time
import niwaki as nw

class Slow(nw.ScriptedBackend):
    def close(self, branch):
        time.sleep(0.2)
        super().close(branch)

    def __del__(self):
        time.sleep(0.2)
        sys.stdout.write("freed")
        sys.stdout.flush()

@nw.function
def f(s):
    s += nw.gen("x")

f.run(backend=Slow(lambda prompt: "ok")).sync()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed", "")
