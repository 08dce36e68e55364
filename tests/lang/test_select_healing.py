"""`select` behind a blank, or a token that its choices merge with: scored as the tokenizer writes the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.api import Segment
from niwaki.runtime.api.choices import METHODS
from tests.toy import make_model

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine

WEB = ["see http://www.cat.org and http://dog.org", "the cat sat on the mat"] * 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from niwaki.runtime.engine import Engine

    with Engine(make_model(tmp_path_factory.mktemp("heal"), sharpness=3.0, texts=WEB), kv_tokens=4096) as made:
        yield made


@nw.function
def pick(s: State, before: str, choices: Sequence[str], method: str = "exact", heal: bool | None = None) -> None:
    s += before + nw.select("x", choices=choices, choices_method=method, heal=heal)


def scores(state: State) -> list[tuple[list[str], list[float]]]:
    """Of each choice the tokens that were scored and their log-probabilities."""
    told = cast("list[list[tuple[float, int, str]]]", state.get_meta_info("x")["input_token_logprobs"])
    return [([text for _, _, text in row], [logprob for logprob, _, _ in row]) for row in told]


@pytest.mark.parametrize("method", METHODS)
def test_a_trailing_blank_changes_nothing(method: str, engine: Engine) -> None:
    asked = pick.run("the cat and the ", ["dog", "mat", "cat sat"], method, backend=engine)
    usual = pick.run("the cat and the", [" dog", " mat", " cat sat"], method, backend=engine)
    assert f" {asked['x']}" == usual["x"]
    assert asked.text() == usual.text()
    assert asked.token_ids == usual.token_ids, "the branch holds what was scored"
    for (tokens, logprobs), (usual_tokens, usual_logprobs) in zip(scores(asked), scores(usual), strict=True):
        assert tokens == usual_tokens
        assert logprobs == pytest.approx(usual_logprobs, abs=1e-5)
    told, wanted = (state.get_meta_info("x")["normalized_prompt_logprobs"] for state in (asked, usual))
    assert told == pytest.approx(wanted, abs=1e-5)


def test_a_token_that_one_choice_merges_with_is_scored_with_every_choice(engine: Engine) -> None:
    state = pick.run("see http:", ["//www", " the cat"], backend=engine)
    assert [tokens for tokens, _ in scores(state)] == [["://", "www"], [":", " the", " cat"]]
    branch = engine.backend.open()
    for row, whole in zip(scores(state), ("://www", ": the cat"), strict=True):
        (alone,) = engine.backend.score(branch, [Segment("" if branch.token_ids else "see http")], [whole]).result(60)
        assert row[1] == pytest.approx([token.logprob for token in alone.logprobs], abs=1e-5)
    probabilities = state.get_meta_info("x")["probabilities"]
    assert isinstance(probabilities, list)
    assert sum(probabilities) == pytest.approx(1.0)


def test_choices_that_merge_with_nothing_are_scored_by_themselves(engine: Engine) -> None:
    for heal in (None, False):
        state = pick.run("the cat", [" sat", " and"], heal=heal, backend=engine)
        assert [tokens for tokens, _ in scores(state)] == [[" sat"], [" and"]]


def test_healing_is_off_where_it_is_said(engine: Engine) -> None:
    @nw.function
    def by_gen(s: State) -> None:
        s += "the " + nw.gen("x", choices=["cat", "dog"], heal=False)

    off = (
        pick.run("the ", ["cat", "dog"], heal=False, backend=engine),
        pick.run("the ", ["cat", "dog"], backend=engine, heal=False),
        by_gen.run(backend=engine),
    )
    for state in off:
        assert [tokens for tokens, _ in scores(state)] == [["cat"], ["dog"]]
        written = engine.tokenizer.encode([Segment("the ")], at_start=True)
        assert list(state.token_ids[: len(written)]) == written
    with pytest.raises(nw.ProgramError, match="heal must be True or False, got 'no'"):
        nw.select("x", choices=["a"], heal="no")  # type: ignore[arg-type]  # the mistake itself


def test_what_a_model_or_a_template_wrote_is_never_taken_back(engine: Engine) -> None:
    backend = engine.backend
    branch = backend.open()
    backend.append(branch, [Segment("the ", control=True)])
    (score,) = backend.score(branch, [], ["cat"], heal=True).result(60)
    assert [token.text for token in score.logprobs] == ["cat"]
    backend.append(branch, [Segment("cat and the ")])
    (score,) = backend.score(branch, [], ["cat"], heal=True).result(60)
    assert [token.text for token in score.logprobs] == [" cat"]
    backend.close(branch)


def test_text_forks_and_calls_behind_a_healed_choice_go_on(engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "see http:" + nw.select("x", choices=["//dog", "//cat"], choices_method="greedy_token_selection")
        forks = s.fork(2)
        forks += ".org" + nw.gen("y", max_tokens=3, temperature=0, ignore_eos=True)
        forks.join()
        s += " and" + nw.gen("z", max_tokens=2, temperature=0, ignore_eos=True)

    state = f.run(backend=engine)
    ys = state["y"]
    assert isinstance(ys, list)
    assert ys[0] == ys[1]
    assert state.text() == f"see http:{state['x']} and{state['z']}"
    assert engine.tokenizer.decode(state.token_ids) == state.text()
    del state
    engine.backend.check()
    assert engine.stats()["requests_running"] == 0
