"""The four ways to select, against numbers worked out by hand and against float64 through transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import niwaki as nw
from niwaki.lang.meta import Logprob
from niwaki.lang.state import State
from niwaki.runtime.api import Score, Segment, TokenLogprob
from niwaki.runtime.api.choices import ChoicesMethod, choice_logprobs, method_of
from tests.toy import make_model

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine

METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "exact")


def score(text: str, *tokens: tuple[int, float | None]) -> Score:
    """A score of (token id, log-probability) pairs."""
    return Score(text, tuple(TokenLogprob(logprob, token_id, None) for token_id, logprob in tokens))


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# ---------------------------------------------------------------------------------------------------------------
# By hand
# ---------------------------------------------------------------------------------------------------------------


def test_greedy_selection_takes_the_likeliest_first_token_whatever_follows() -> None:
    scores = [score("ab", (1, -0.5), (2, -9.0)), score("cd", (3, -1.0), (4, -0.1))]
    assert method_of("greedy_token_selection").decide(scores).index == 0
    assert method_of("token_length_normalized").decide(scores).index == 1


def test_greedy_selection_pads_a_finished_choice_with_its_own_mean() -> None:
    # The third column decides: -1.5 is the mean of the first choice, -1.6 the second's third token.
    scores = [score("ab", (1, -1.0), (2, -2.0)), score("abc", (1, -1.0), (2, -2.0), (3, -1.6))]
    decision = method_of("greedy_token_selection").decide(scores)
    assert decision.index == 0
    assert decision.meta["greedy_logprob_matrix"] == [[-1.0, -2.0, -1.5], [-1.0, -2.0, -1.6]]


def test_greedy_selection_is_not_decided_by_the_last_bits_of_a_shared_token() -> None:
    scores = [score("ab", (1, -1.0), (2, -3.0)), score("ac", (1, -1.0000001), (3, -2.0))]
    assert method_of("greedy_token_selection").decide(scores).index == 1


def test_the_first_of_equals_wins_in_every_method() -> None:
    scores = [score("a", (1, -1.0)), score("b", (2, -1.0))]
    for name in METHODS:
        assert method_of(name).decide(scores, scores).index == 0, name


def test_unconditional_normalisation_takes_away_what_a_choice_is_worth_anywhere() -> None:
    given_text = [score("the", (1, -1.0)), score("quark", (2, -2.0), (3, -1.0))]
    alone = [score("the", (1, -1.2)), score("quark", (2, -9.0), (3, -2.0))]
    decision = method_of("unconditional_likelihood_normalized").decide(given_text, alone)
    assert decision.index == 1
    gains = decision.meta["normalized_unconditional_prompt_logprobs"]
    assert gains == pytest.approx([0.2, ((-2.0 + 9.0) + (-1.0 + 2.0)) / 2])
    assert decision.meta["unconditional_token_logprobs"] == [[(-1.2, 1, None)], [(-9.0, 2, None), (-2.0, 3, None)]]


def test_a_first_token_that_nothing_stands_before_counts_as_certain() -> None:
    decision = method_of("unconditional_likelihood_normalized").decide([score("a", (1, -1.0))], [score("a", (1, None))])
    assert decision.meta["normalized_unconditional_prompt_logprobs"] == [-1.0]


def test_exact_probabilities_are_renormalised_at_every_step() -> None:
    a, b, ax, ay = log(0.2, 0.1, 0.01, 0.03)
    scores = [score("ax", (1, a), (2, ax)), score("ay", (1, a), (3, ay)), score("b", (4, b))]
    # The root allows a and b: 2/3 and 1/3. Behind a stand x and y: 1/4 and 3/4.
    assert np.exp(choice_logprobs(scores)) == pytest.approx([2 / 3 / 4, 2 / 3 * 3 / 4, 1 / 3])
    assert method_of("exact").decide(scores).index == 1


def test_a_choice_that_begins_a_longer_one_ends_where_the_longer_does_not_go_on() -> None:
    yes, no, sir = log(0.3, 0.1, 0.2)
    scores = [score("yes", (1, yes)), score("yes sir", (1, yes), (2, sir)), score("no", (3, no))]
    assert np.exp(choice_logprobs(scores)) == pytest.approx([0.75 * 0.8, 0.75 * 0.2, 0.25])


def test_a_chain_of_prefixes_sums_to_one() -> None:
    p = log(0.5, 0.9, 0.4)
    scores = [score("abc"[: n + 1], *[(i, p[i]) for i in range(n + 1)]) for n in range(3)]
    assert np.exp(choice_logprobs(scores)) == pytest.approx([0.1, 0.9 * 0.6, 0.9 * 0.4])


def test_a_certain_continuation_leaves_its_prefix_next_to_nothing() -> None:
    scores = [score("a", (1, -1.0)), score("ab", (1, -1.0), (2, 0.0))]
    ends, goes_on = choice_logprobs(scores)
    assert math.isfinite(ends)
    assert math.exp(ends) < 1e-9
    assert goes_on == pytest.approx(0.0, abs=1e-9)


def test_choices_of_the_same_tokens_are_an_error() -> None:
    with pytest.raises(nw.GenerationError, match="same tokens"):
        choice_logprobs([score("a", (1, -1.0)), score("A", (1, -1.0))])


def test_exact_says_so_where_nothing_stands_before_a_choice() -> None:
    with pytest.raises(nw.GenerationError, match="add text before the select"):
        method_of("exact").decide([score("a", (1, None))])


@st.composite
def tries(draw: st.DrawFn) -> list[Score]:
    """Scores of random choices over three tokens, with one log-probability for each place in the trie."""
    paths = draw(st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    places = sorted({path[:n] for path in paths for n in range(len(path))})
    # Of four continuations at each place; the fourth is what no choice takes.
    at = {place: np.log(rng.dirichlet([0.5] * 4) + 1e-9) for place in places}
    return [
        score(str(path), *[(token, min(0.0, float(at[path[:n]][token]))) for n, token in enumerate(path)])
        for path in sorted(paths)
    ]


@given(tries())
def test_exact_probabilities_sum_to_one(scores: Sequence[Score]) -> None:
    logprobs = choice_logprobs(scores)
    assert all(math.isfinite(value) and value <= 1e-9 for value in logprobs)
    assert sum(math.exp(value) for value in logprobs) == pytest.approx(1.0, abs=1e-9)


def test_an_unknown_method_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(nw.ProgramError, match=r"greedy_token_selection, .*exact.*got 'best'"):
        nw.select("x", choices=["a"], choices_method="best")


def test_a_method_may_be_given_by_name() -> None:
    named = nw.select("x", choices=["a"], choices_method="greedy_token_selection")
    assert named == nw.select("x", choices=["a"], choices_method=nw.greedy_token_selection)


# ---------------------------------------------------------------------------------------------------------------
# On a model, against float64
# ---------------------------------------------------------------------------------------------------------------

PROMPT = "the cat sat on the"
CHOICES = (" mat", " dog and the cat", " log", " mat and", " Zürich", " m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("select") / "toy", seed=5, sharpness=3.0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    from niwaki.runtime.engine import Engine

    with Engine(folder, dtype="float32", kv_tokens=16_384) as engine:
        yield engine


class Reference:
    """Log-probabilities of next tokens in float64, by another implementation of the same model."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self._torch = torch
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def logprobs(self, before: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """log p of each of `tokens`, after `before` and those in front of it."""
        ids = [*before, *tokens]
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([ids])).logits[0]
        table = self._torch.log_softmax(logits, dim=-1)
        return [float(table[len(before) + n - 1, token]) for n, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@nw.function
def pick(s: State, method: ChoicesMethod | str) -> None:
    s += PROMPT + nw.select("x", choices=CHOICES, choices_method=method)


def tokens_of(engine: Engine, text: str, *, at_start: bool = False) -> list[int]:
    return engine.tokenizer.encode([Segment(text)], at_start=at_start)


def expected(engine: Engine, reference: Reference) -> dict[str, list[float]]:
    """The formulas as they are published, in float64, token by token."""
    prompt = tokens_of(engine, PROMPT, at_start=True)
    start = tokens_of(engine, "", at_start=True)
    rows = [tokens_of(engine, choice) for choice in CHOICES]
    given_text = [reference.logprobs(prompt, row) for row in rows]
    alone = [reference.logprobs(start, row) for row in rows]
    probabilities = []
    for row in rows:
        p = 1.0
        for n in range(len(row) + 1):
            following = {other[n] for other in rows if other[:n] == row[:n] and len(other) > n}
            of = {t: math.exp(reference.logprobs([*prompt, *row[:n]], [t])[0]) for t in following}
            if n == len(row):
                p *= 1.0 - sum(of.values())
            else:
                p *= of[row[n]] / (1.0 if row[:n] in rows else sum(of.values()))
        probabilities.append(p)
    return {
        "normalized_prompt_logprobs": [sum(values) / len(values) for values in given_text],
        "normalized_unconditional_prompt_logprobs": [
            sum(a - b for a, b in zip(values, offsets, strict=True)) / len(values)
            for values, offsets in zip(given_text, alone, strict=True)
        ],
        "probabilities": probabilities,
    }


def test_the_model_s_scores_are_those_of_float64(engine: Engine, reference: Reference) -> None:
    wanted = expected(engine, reference)
    assert sum(wanted["probabilities"]) == pytest.approx(1.0, abs=1e-9), "the reference itself"
    seen = {name: pick.run(name, backend=engine).get_meta_info("x") for name in METHODS}
    for name, meta in seen.items():
        for key in ("normalized_prompt_logprobs", "probabilities"):
            assert meta[key] == pytest.approx(wanted[key], abs=2e-4), (name, key)
    told = seen["unconditional_likelihood_normalized"]["normalized_unconditional_prompt_logprobs"]
    assert told == pytest.approx(wanted["normalized_unconditional_prompt_logprobs"], abs=2e-4)


def test_each_method_picks_what_float64_picks(engine: Engine, reference: Reference) -> None:
    wanted = expected(engine, reference)
    keys = {
        "token_length_normalized": "normalized_prompt_logprobs",
        "unconditional_likelihood_normalized": "normalized_unconditional_prompt_logprobs",
        "exact": "probabilities",
    }
    for name, key in keys.items():
        assert pick.run(name, backend=engine)["x"] == CHOICES[int(np.argmax(wanted[key]))], name


def test_greedy_selection_follows_the_likeliest_token_of_the_trie(engine: Engine, reference: Reference) -> None:
    prompt = tokens_of(engine, PROMPT, at_start=True)
    firsts = sorted({tokens_of(engine, choice)[0] for choice in CHOICES})
    best = max(firsts, key=lambda token: reference.logprobs(prompt, [token])[0])
    assert tokens_of(engine, str(pick.run("greedy_token_selection", backend=engine)["x"]))[0] == best


def test_meta_info_has_every_token_of_every_choice(engine: Engine) -> None:
    meta = pick.run("exact", backend=engine).get_meta_info("x")
    tokens = cast("list[list[Logprob]]", meta["input_token_logprobs"])
    assert [[token_id for _, token_id, _ in row] for row in tokens] == [tokens_of(engine, c) for c in CHOICES]
    assert cast("object", meta["output_token_logprobs"]) == [[] for _ in CHOICES]
    assert np.exp(meta["choice_logprobs"]) == pytest.approx(meta["probabilities"])


def test_choices_alone_are_scored_after_the_begin_of_text_token(engine: Engine, reference: Reference) -> None:
    scoring = engine.backend.score(engine.backend.open(), (), ["a", "the cat"])
    start = tokens_of(engine, "", at_start=True)
    for one in scoring.result(60):
        ids = [token.token_id for token in one.logprobs]
        assert [token.logprob for token in one.logprobs] == pytest.approx(reference.logprobs(start, ids), abs=2e-4)


def test_a_thousand_choices_are_one_call_and_one_prefill_of_the_text(engine: Engine) -> None:
    choices = [f" number {n}" for n in range(1000)]  # many of them begin others
    text = "a b c 1 2 3 yes no maybe " * 12

    @nw.function
    def f(s: State) -> None:
        s += text + nw.select("x", choices=choices, choices_method="exact")

    before = engine.stats()["prefilled_tokens"]
    state = f.run(backend=engine)
    meta = state.get_meta_info("x")
    probabilities = meta["probabilities"]
    assert isinstance(probabilities, list)
    assert len(probabilities) == 1000
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-6)
    assert state["x"] == choices[int(np.argmax(probabilities))]
    assert state.usage.calls == 1
    own = sum(len(tokens_of(engine, choice)) for choice in choices)
    prefilled = engine.stats()["prefilled_tokens"] - before
    assert prefilled <= len(tokens_of(engine, text, at_start=True)) + own
    assert engine.stats()["requests_running"] == 0
    engine.backend.check()
