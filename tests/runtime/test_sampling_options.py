"""Each sampling option, asked of the engine, does what its formula does to the logits of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaForCausalLM

import niwaki as nw
from niwaki.runtime.api import SamplingOptions
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.from_dict import spelling_of
from tests.toy import make_model

Logits = npt.NDArray[np.float64]
# What an option makes of the logits, from the prompt and what was generated so far.
Formula = Callable[[Logits, list[int], list[int]], None]

PROMPT = [0, 17, 80, 31, 200, 31, 9, 80]
END = 1  # what the toy model ends with
DRAWS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=2.0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv_tokens=4096) as made:
        yield made


@pytest.fixture(scope="module")
def logits_after(folder: Path) -> Callable[[list[int]], Logits]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def read(ids: list[int]) -> Logits:
        with torch.inference_mode():
            return np.asarray(model(torch.tensor([ids])).logits[0, -1].double().numpy())

    return read


def generated(engine: Engine, **options: object) -> tuple[list[int], object]:
    """The tokens, and why they end."""
    result = engine.generate(input_ids=PROMPT, sampling_params=options)
    assert isinstance(result, dict)
    assert isinstance(result["meta_info"], dict)
    return output_ids(result), result["meta_info"]["finish_reason"]


def output_ids(result: object) -> list[int]:
    assert isinstance(result, dict)
    return list(result["output_ids"])


def repeat(logits: Logits, prompt: list[int], output: list[int]) -> None:
    seen = sorted({*prompt, *output})
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.8, logits[seen] * 1.8)


def frequent(logits: Logits, prompt: list[int], output: list[int]) -> None:
    for token in output:
        logits[token] -= 1.5


def present(logits: Logits, prompt: list[int], output: list[int]) -> None:
    logits[sorted(set(output))] -= 2.0


def biased(logits: Logits, prompt: list[int], output: list[int]) -> None:
    logits[[44, 45]] += [6.0, 5.5]


@pytest.mark.parametrize(
    ("option", "formula"),
    [
        ({"repetition_penalty": 1.8}, repeat),
        ({"frequency_penalty": 1.5}, frequent),
        ({"presence_penalty": 2.0}, present),
        ({"logit_bias": {44: 6.0, 45: 5.5}}, biased),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_penalty_or_bias_changes_the_logits_by_its_formula(
    engine: Engine, logits_after: Callable[[list[int]], Logits], option: dict[str, object], formula: Formula
) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    expected: list[int] = []
    for _ in range(24):
        logits = logits_after(PROMPT + expected)
        formula(logits, PROMPT, expected)
        expected.append(int(logits.argmax()))
    assert generated(engine, **greedy, **option)[0] == expected
    assert generated(engine, **greedy)[0] != expected, "the option changes nothing here: a weak test"


@pytest.mark.parametrize(
    ("options", "num_possible"),
    [
        ({"temperature": 0.4}, None),
        ({"temperature": 1.6}, None),
        ({"temperature": 1.5, "top_k": 3}, 3),
        ({"temperature": 1.5, "top_p": 0.4}, None),
        ({"temperature": 1.5, "min_p": 0.05}, None),
    ],
    ids=str,
)
def test_what_is_drawn_is_what_the_options_leave_and_as_often(
    engine: Engine,
    logits_after: Callable[[list[int]], Logits],
    options: dict[str, float],
    num_possible: int | None,
) -> None:
    scaled = logits_after(PROMPT) / options["temperature"]
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[: int(options.get("top_k", len(order)))]
    kept = kept[before[: len(kept)] < options.get("top_p", 1.0)]
    kept = kept[probabilities[kept] >= options.get("min_p", 0.0) * probabilities.max()]
    probabilities = probabilities[kept] / probabilities[kept].sum()

    params = [{**options, "seed": seed, "max_new_tokens": 1, "ignore_eos": True} for seed in range(DRAWS)]
    results = engine.generate(input_ids=[PROMPT] * DRAWS, sampling_params=params)
    assert isinstance(results, list)
    drawn = Counter(output_ids(result)[0] for result in results)
    assert set(drawn) <= set(kept.tolist())
    assert len(drawn) > 1
    assert num_possible in (None, len(kept))
    for token, probability in zip(kept[:5].tolist(), probabilities[:5].tolist(), strict=False):
        spread = (probability * (1 - probability) / DRAWS) ** 0.5
        assert abs(drawn[token] / DRAWS - probability) < 4.5 * spread + 1e-9


def test_options_show_what_was_said_alone() -> None:
    assert repr(SamplingOptions(temperature=0.5, stop="\n")) == "SamplingOptions(temperature=0.5, stop='\\n')"
    assert "options=SamplingOptions()" in repr(nw.gen("x"))


def test_a_type_checker_knows_what_a_result_holds(engine: Engine) -> None:
    (result,) = engine.generate(["Hi"], {"max_tokens": 2, "temperature": 0})
    text: str = result["text"]
    ids: list[int] = result["output_ids"]
    assert engine.tokenizer.decode(ids) == text
    assert result["meta_info"]["completion_tokens"] == 2


def test_nothing_ends_before_min_tokens(engine: Engine) -> None:
    always = {"temperature": 0.0, "max_new_tokens": 9}
    assert generated(engine, **always, logit_bias={END: 100}) == ([END], {"type": "stop", "matched": END})
    tokens, reason = generated(engine, **always, logit_bias={END: 100}, min_tokens=4)
    assert END not in tokens[:4]
    assert (tokens[4:], reason) == ([END], {"type": "stop", "matched": END})
    stop = {"logit_bias": {44: 100}, "stop_token_ids": [44], "min_tokens": 4}
    tokens, reason = generated(engine, **always, **stop)
    assert 44 not in tokens[:4]
    assert (tokens[4:], reason) == ([44], {"type": "stop", "matched": 44})


def test_stop_tokens_wait_for_min_tokens_in_a_model_without_an_end_token_too(tmp_path: Path) -> None:
    with Engine(make_model(tmp_path, eos_token_id=[]), kv_tokens=1024) as engine:
        stop = {"logit_bias": {44: 100}, "stop_token_ids": [44], "min_tokens": 4}
        tokens, reason = generated(engine, temperature=0.0, max_new_tokens=9, **stop)
    assert (len(tokens), tokens.index(44), reason) == (5, 4, {"type": "stop", "matched": 44})


def test_ignore_eos_goes_on_behind_the_end_token(engine: Engine) -> None:
    tokens, reason = generated(engine, temperature=0.0, max_new_tokens=6, logit_bias={END: 100}, ignore_eos=True)
    assert (tokens, reason) == ([END] * 6, {"type": "length", "length": 6})


def test_options_are_spelt_alike_only_in_the_same_types() -> None:
    said = {"temperature": 0, "stop": "a"}
    assert spelling_of(said) == spelling_of(dict(said))
    others: list[dict[str, object]] = [{**said, "temperature": False}, {**said, "temperature": 0.0}, {"stop": "a"}]
    for other in others:
        assert spelling_of(said) != spelling_of(other)
    assert spelling_of({"stop": ["a"]}) is None
