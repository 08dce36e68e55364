"""Text about which a constraint leaves no choice is written without the model, as the tokenizer would cut it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niwaki.runtime import bundled
from niwaki.runtime.api import (
    Choices,
    ConfigError,
    Constraint,
    Generation,
    JsonSchema,
    Output,
    Regex,
    SamplingParams,
    Segment,
)
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary, compile_constraint
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.protocol import ANY_BYTE, Forced
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.loop.forced import forced_tokens, take_with_forced
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.from_dict import options_from_dict
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled
from tests.oracle import OracleRunner
from tests.toy import make_model, make_tokenizer
from tests.toy_constraints import make_vocabulary

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "n": {"type": "integer"},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.2, "max_new_tokens": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv_tokens=4096) as made:
        yield made


def boundaries_of(folder: Path) -> tuple[Tokenizer, Boundaries]:
    tokenizer = Tokenizer(folder)
    return tokenizer, Boundaries(Vocabulary(tokenizer.token_bytes, {1}), tokenizer.plain_ids)


def vocabulary_of(engine: Engine) -> Vocabulary:
    return Vocabulary(engine.tokenizer.token_bytes, {1}, engine.vocab_size)


def result(answer: object) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return answer


# ---------------------------------------------------------------------------------------------------------------
# Which tokens are sure
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "follow"), [(" text, its texts whe", b"r"), ("` brings thei", ANY_BYTE), (" row by it", b"s")]
)
def test_a_longer_token_behind_the_end_may_cut_earlier_than_a_short_one(text: str, follow: bytes) -> None:
    """`her` reaches over the end of `whe` and leaves the blank before it alone; `here` does not."""
    tokenizer, boundaries = boundaries_of(bundled.MODEL_DIR)
    before = tokenizer.plain_ids("join")
    sure = [*before, *boundaries.tokens_of(before, Forced(text.encode(), follow))]
    for rest in ("r", "re", "re they", "r was", "rs", "s", "self", "s own"):
        if rest.encode()[0] in follow:
            assert tokenizer.plain_ids("join" + text + rest)[: len(sure)] == sure, rest


def test_a_word_that_is_not_whole_is_held_back() -> None:
    """The bundled tokenizer cuts ` before` by itself, and has no token that begins with ` bef`."""
    tokenizer, boundaries = boundaries_of(bundled.MODEL_DIR)
    before = tokenizer.plain_ids("every choice on the ")
    for text in ("text bef", "text befo"):
        sure = [*before, *boundaries.tokens_of(before, Forced(text.encode(), ANY_BYTE))]
        assert len(sure) > len(before)
        for rest in ("x", "ore it", "re it", "ored"):
            assert tokenizer.plain_ids(f"every choice on the {text}{rest}")[: len(sure)] == sure, rest


@pytest.mark.parametrize("name", ["bundled", "toy"])
def test_whatever_follows_the_tokenizer_begins_with_the_forced_tokens(name: str, tmp_path: Path) -> None:
    tokenizer, boundaries = boundaries_of(bundled.MODEL_DIR if name == "bundled" else make_tokenizer(tmp_path))
    draw = random.Random(3)
    text = "".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    text += json.dumps({"name": "Zoë", "tags": ["a b", "été"], "n": [1, 20, -3.5], "ok": None}) * 4
    forced = 0
    for _ in range(140):
        start = draw.randrange(len(text) - 80)
        whole = text[start : start + 60]
        cut, end = sorted(draw.sample(range(20, 50), 2))
        before, middle, after = whole[:cut], whole[cut:end], whole[end:]
        ids = tokenizer.plain_ids(whole)
        before_ids = tokenizer.plain_ids(before)
        if ids[: len(before_ids)] != before_ids:
            continue
        for follow in (ANY_BYTE, after.encode()[:1]):
            run = boundaries.tokens_of(before_ids, Forced(middle.encode(), follow))
            assert ids[len(before_ids) :][: len(run)] == list(run), (before, middle, after)
            forced += len(run)
    assert forced > 250  # and it does not hold back everything


@pytest.mark.parametrize(("forced", "end"), [('","summary":"', '","summary":"'), (" and then", " then")])
def test_no_continuation_of_a_forced_text_is_encoded_twice(forced: str, end: str) -> None:
    """A token may go on from several places of the end as another one does, or as a single character. `end`: from the
    last word on that no token reaches over."""
    tokenizer = Tokenizer(bundled.MODEL_DIR)
    asked: Counter[str] = Counter()

    def encode(text: str) -> list[int]:
        asked[text] += 1
        return tokenizer.plain_ids(text)

    boundaries = Boundaries(Vocabulary(tokenizer.token_bytes, {1}), encode)
    assert boundaries.tokens_of(tokenizer.plain_ids("so"), Forced(forced.encode(), ANY_BYTE))
    continued = [count for text, count in asked.items() if text.startswith(end) and text != end]
    assert len(continued) > 30
    assert set(continued) == {1}


def test_a_run_stops_where_what_follows_may_merge_with_it() -> None:
    tokenizer, boundaries = boundaries_of(bundled.MODEL_DIR)

    def texts(before: str, forced: str, follow: bytes) -> list[str]:
        run = boundaries.tokens_of(tokenizer.plain_ids(before), Forced(forced.encode(), follow))
        return [tokenizer.token_text(token_id) for token_id in run]

    assert texts("", '{"name":"', ANY_BYTE) == ['{"', "name", '":"']
    assert texts("", '{"name":', b"0123456789") == ['{"', "name", '":']
    assert texts("", '{"name":', b'"0') == ['{"', "name"]  # `":"` is one token
    assert texts("", '{"name":', b"") == ['{"', "name", '":']  # the end
    assert texts("x", "é"[:0], ANY_BYTE) == []


def test_a_run_behind_which_the_text_could_not_end_within_its_budget_is_not_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer may take more tokens for it than the shortest ending that was kept free."""
    _, boundaries = boundaries_of(make_tokenizer(tmp_path))
    matcher = compile_constraint(Regex("the cat sat[0-9]+"), make_vocabulary(tmp_path / "of matchers")).matcher()
    forced = matcher.forced_text()
    assert forced.text
    asked: list[int] = []

    def fits(own: Matcher, remaining: int) -> bool:
        asked.append(remaining)
        return remaining > 30

    monkeypatch.setattr(type(matcher), "fits", fits)
    assert forced_tokens(matcher, [], 30, boundaries) == []
    assert matcher.forced_text() == forced, "it stands where it stood"
    run = forced_tokens(matcher, [], 60, boundaries)
    assert asked == [30 - len(run), 60 - len(run)]
    assert matcher.forced_text() != forced


def test_a_character_that_is_not_whole_is_held_back() -> None:
    tokenizer, boundaries = boundaries_of(bundled.MODEL_DIR)
    run = boundaries.tokens_of([], Forced("a,é".encode()[:-1], b"\xa9\xa8"))
    assert tokenizer.decode(run) == "a,"


# ---------------------------------------------------------------------------------------------------------------
# The same distribution
# ---------------------------------------------------------------------------------------------------------------

# Sets of texts that share what a constraint forces, with values at which the tokens around them merge differently.
VALUES = ["cat", "the cat", "", "a", "1", "é", ' "', "no", "not", "東京"]
TEXTS = {
    json.dumps({"name": one, "n": n}, ensure_ascii=False, separators=(",", ":")): 1.0 + n
    for one in VALUES
    for n in range(3)
}
STRING = r'"([^"\\]|\\["\\])*"'


def runs(force: bool, constraint: Constraint, texts: Mapping[str, float], folder: Path, seeds: range) -> list[Output]:
    """One generation for each seed by a model that is exactly right about `texts`."""
    tokenizer = Tokenizer(folder)
    vocabulary = Vocabulary(tokenizer.token_bytes, {1})
    prompt = np.array([0, *tokenizer.plain_ids("the cat:")], np.int32)
    model = OracleRunner(
        {tuple(tokenizer.plain_ids(text)): weight for text, weight in texts.items()},
        len(prompt), vocabulary.size, 1, num_pages=4096,
    )  # fmt: skip
    config = EngineConfig(kv_tokens=65536, max_running_requests=500, force_tokens=force)
    core = EngineCore(
        model,  # type: ignore[arg-type]  # what the core asks of a runner
        tokenizer, config, 4096,
        boundaries=Boundaries(vocabulary, tokenizer.plain_ids),
    )  # fmt: skip
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    compiled = compiler.compile(constraint)
    params = SamplingParams(max_new_tokens=100, constraint=constraint)
    running: list[Generation] = []
    for seed in seeds:
        running.append(Generation())
        job = GenerateJob(running[-1], 1)
        core.submit([Request(seed, job, 0, prompt, params, tokenizer, seed=seed, matcher=compiled.matcher())])
    while core.has_work:
        core.step()
    core.pages.cache.check()
    compiler.close()
    assert (core.counters.forced_tokens > 0) == force
    return [generation.result(0)[0] for generation in running]


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(
            json.dumps(
                {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
                    "required": ["name", "n"],
                    "additionalProperties": False,
                }
            )
        ),
        Regex(rf'\{{"name":{STRING},"n":[0-9]\}}'),
        Choices(tuple(TEXTS)),
    ],
    ids=["schema", "regex", "choices"],
)
def test_forcing_changes_no_token_of_a_model_that_writes_as_its_tokenizer_does(
    constraint: Constraint, tmp_path: Path
) -> None:
    folder = make_tokenizer(tmp_path, texts=list(TEXTS))  # with tokens such as `":"",` and `":`
    forced = runs(True, constraint, TEXTS, folder, range(200))
    drawn = runs(False, constraint, TEXTS, folder, range(200))
    assert [output.token_ids for output in forced] == [output.token_ids for output in drawn]
    counts = Counter(output.text for output in forced)
    assert counts.keys() <= TEXTS.keys()
    total = sum(TEXTS.values())
    expected = {text: 200 * weight / total for text, weight in TEXTS.items()}
    chi_square = sum((counts[text] - mean) ** 2 / mean for text, mean in expected.items())
    assert chi_square < 58.3  # the 0.1 % point at 29 degrees of freedom


# ---------------------------------------------------------------------------------------------------------------
# In the engine
# ---------------------------------------------------------------------------------------------------------------


def test_forced_tokens_are_what_the_tokenizer_makes_of_the_text(engine: Engine) -> None:
    for seed in range(8):
        one = result(engine.generate("the cat", {**HOT, "seed": seed, "json_schema": RECORD}))
        value = json.loads(one["text"])
        assert list(value) == ["name", "kind", "n"]
        ids = engine.tokenizer.plain_ids(one["text"])
        first = engine.tokenizer.plain_ids('{"name"')
        assert one["output_ids"][: len(first) - 1] == ids[: len(first) - 1]


def test_a_text_without_any_choice_needs_no_model(engine: Engine) -> None:
    before = dict(engine.stats())
    one = result(engine.generate("the cat", {**HOT, "choices": ["the dog sat on the mat"]}))
    assert one["text"] == "the dog sat on the mat"
    assert one["meta_info"]["finish_reason"] == {"type": "stop"}
    assert engine.stats()["steps"] == before["steps"]
    assert engine.stats()["forced_tokens"] - before["forced_tokens"] == len(one["output_ids"])


def test_fewer_steps_are_taken_and_the_switch_turns_it_off(folder: Path) -> None:
    steps = []
    for force in (True, False):
        with Engine(folder, kv_tokens=4096, force_tokens=force) as one:
            one.generate(["the cat", "the dog"], {**HOT, "seed": 1, "json_schema": RECORD})
            steps.append(one.stats()["steps"])
            assert (one.stats()["forced_tokens"] > 0) == force
            one.backend.check()
    assert steps[0] < 0.7 * steps[1]
    with pytest.raises(ConfigError, match="force_tokens must be True or False, got 1"):
        Engine(folder, force_tokens=1)


def test_log_probabilities_of_forced_tokens_are_the_models(engine: Engine) -> None:
    prompt = engine.tokenizer.encode([Segment("the cat")], at_start=True)
    options = {**HOT, "seed": 4, "json_schema": RECORD}
    plain = result(engine.generate(input_ids=prompt, sampling_params=options))
    told = result(engine.generate(input_ids=prompt, sampling_params=options, return_logprob=True, top_logprobs_num=2))
    assert told["output_ids"] == plain["output_ids"]
    read = result(
        engine.generate(
            input_ids=[*prompt, *plain["output_ids"]], sampling_params={"max_new_tokens": 1},
            return_logprob=True, logprob_start_len=len(prompt), top_logprobs_num=2,
        )
    )  # fmt: skip
    for ours, theirs in zip(
        told["meta_info"]["output_token_logprobs"], read["meta_info"]["input_token_logprobs"], strict=True
    ):
        assert ours[1] == theirs[1]
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    assert len(told["meta_info"]["output_top_logprobs"]) == len(told["output_ids"])


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stop", ['me"', '{"', '":"'])
def test_a_stop_string_inside_a_forced_run_ends_the_text_before_it(stop: str, logprobs: bool, engine: Engine) -> None:
    branch = engine.backend.open()
    params = SamplingParams(
        max_new_tokens=40, seed=1, stop=(stop,), constraint=JsonSchema(json.dumps(RECORD)), return_logprob=logprobs
    )
    prompt = engine.tokenizer.encode([Segment("the cat")], at_start=True)
    (output,) = engine.backend.generate(branch, [Segment("the cat")], params).result(60)
    whole = '{"name":"'
    assert output.text == whole[: whole.index(stop)]
    assert output.finish_reason.matched == stop
    assert len(output.logprobs) == (len(output.token_ids) if logprobs else 0)
    assert all(index < len(output.token_ids) for index in output.forced)
    assert list(branch.token_ids) == prompt + engine.tokenizer.plain_ids(output.text)
    engine.backend.close(branch)
    engine.backend.check()


def test_streamed_deltas_add_up_with_forced_tokens_among_them(engine: Engine) -> None:
    for logprobs in (False, True):
        params = SamplingParams(
            max_new_tokens=60, seed=2, constraint=JsonSchema(json.dumps(RECORD)), return_logprob=logprobs
        )
        branch = engine.backend.open()
        generation = engine.backend.generate(branch, [Segment("the cat")], params)
        (output,) = generation.result(60)
        deltas = list(generation.deltas())
        assert "".join(delta.text for delta in deltas) == output.text
        assert [i for delta in deltas for i in delta.token_ids] == list(output.token_ids)
        assert sum(len(delta.logprobs) for delta in deltas) == (len(output.token_ids) if logprobs else 0)
        assert 0 < len(output.forced) < len(output.token_ids)
        engine.backend.close(branch)


@pytest.mark.parametrize("prompt", ["the cat", 'the {"na'])
def test_an_output_says_where_its_forced_text_stands(prompt: str, engine: Engine) -> None:
    key = 'me":"naïve 猫",' if prompt.endswith('"na') else '{"name":"naïve 猫",'  # healed, or not
    branch = engine.backend.open()
    params = SamplingParams(
        max_new_tokens=60, seed=2, heal=True, constraint=Regex(re.escape(key) + "[a-z]{4}-ab-[a-z]")
    )
    (output,) = engine.backend.generate(branch, [Segment(prompt)], params).result(60)
    engine.backend.close(branch)
    told = [output.text[start:end] for start, end in output.forced_spans]
    assert "".join(told) == engine.tokenizer.decode([output.token_ids[index] for index in output.forced])
    assert len(told) >= 2, "the key, and what stands in the middle"
    assert told[0] in key
    assert all(text in key or text in "-ab-" for text in told)


def test_who_is_set_back_inside_a_forced_run_says_the_same(engine: Engine) -> None:
    backend, core = engine.backend, engine.backend._core
    set_back: list[int] = []

    def set_all_back() -> None:
        for request in list(core._roster.running.values()):
            if request.num_unshown and request.length not in set_back:
                set_back.append(request.length)
                core._roster.preempt(request)

    ids = np.array(engine.tokenizer.plain_ids("the dog sat on"), np.int32)
    params = SamplingParams(
        max_new_tokens=30, seed=1, return_logprob=True, constraint=Regex("(the cat sat on the (mat|log)!){2}")
    )

    def told() -> tuple[tuple[object, ...], list[float | None]]:
        (output,) = backend.start(ids, params).result(timeout=60)
        said = (output.text, output.token_ids, output.forced, output.allowed)
        return said, [entry.logprob for entry in output.logprobs]

    said, logprobs = told()
    backend.after_step = set_all_back
    try:
        again, others = told()
        assert again == said
        assert others == pytest.approx(logprobs, abs=1e-3)
    finally:
        backend.after_step = lambda: None
    assert set_back


@pytest.mark.parametrize("is_shorter", [True, False])
def test_a_text_that_is_shorter_says_so_though_its_end_is_forced(is_shorter: bool, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    matcher = compile_constraint(Regex("ab"), Vocabulary(tokenizer.token_bytes, frozenset())).matcher()
    request = Request(
        0, GenerateJob(Generation(), 1), 0, np.array([1], np.int32), SamplingParams(max_new_tokens=9), tokenizer,
        matcher=matcher,
    )  # fmt: skip
    first, second = tokenizer.plain_ids("a")[0], tokenizer.plain_ids("b")[0]
    matcher.accept(first)
    matcher.accept(second)
    reason = take_with_forced(request, Sampled(first, is_shorter=is_shorter), [second], frozenset(), Counters())
    assert reason is not None
    assert reason.type == ("length" if is_shorter else "stop")


@pytest.mark.parametrize("forces", [True, False])
def test_an_output_says_how_many_tokens_were_allowed_at_each(forces: bool, folder: Path) -> None:
    constraint = Regex("ab-[a-z]{2}-(?:yes|no)")
    params = SamplingParams(max_new_tokens=20, seed=2, return_logprob=True, constraint=constraint)
    with Engine(folder, kv_tokens=1024, force_tokens=forces) as one:
        branch = one.backend.open()
        (output,) = one.backend.generate(branch, [Segment("the cat")], params).result(60)
        (silent,) = one.backend.generate(branch, [Segment("")], replace(params, return_logprob=False)).result(60)
        one.backend.close(branch)
        vocabulary = Vocabulary(one.tokenizer.token_bytes, frozenset())
        matcher = compile_constraint(constraint, vocabulary).matcher()
        row = np.zeros(vocabulary.num_words, np.uint32)
        expected: list[int] = []
        for index, token_id in enumerate(output.token_ids):
            matcher.fill_mask(row)
            expected.append(1 if index in output.forced else int(np.bitwise_count(row).sum()))
            matcher.accept(token_id)
    assert list(output.allowed) == expected
    assert silent.allowed == ()
    assert bool(output.forced) == forces
    assert max(expected) >= 26


def test_a_small_pool_and_mates_in_the_batch_change_nothing(folder: Path) -> None:
    options = [{**HOT, "seed": n, "json_schema": RECORD} for n in range(12)]
    prompts = ["the cat sat on the mat " * (n % 4 + 1) for n in range(12)]
    answers = []
    for kv_tokens, chunk in ((8192, 512), (224, 16)):
        with Engine(folder, kv_tokens=kv_tokens, chunked_prefill_size=chunk) as one:
            results = one.generate(prompts, options)
            assert isinstance(results, list)
            answers.append([result(r)["output_ids"] for r in results])
            one.backend.check()
            assert one.stats()["pages_held"] == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": RECORD},
        {"json_schema": {"enum": ["a", "the dog sat on the mat", {"a": [1, 2]}]}},
        {"json_schema": {"type": "array", "items": {"const": "abc"}, "maxItems": 3}},
        {"regex": r"\((the|a) cat, [0-9]{4}-[0-9]{2}\)"},
        {"choices": ["no", "yes, the dog", "東京"]},
    ],
    ids=str,
)
def test_what_fits_the_budget_ends_complete_and_valid(constraint: dict[str, object], engine: Engine) -> None:
    """Complete and valid, unless not even the shortest text fits."""
    compiler = ConstraintCompiler(vocabulary_of(engine), seconds=20)
    compiled = compiler.compile(options_from_dict(constraint).resolve().constraint)  # type: ignore[arg-type]
    shortest = compiled.matcher().distance
    compiler.close()
    for budget in (1, shortest - 1, shortest, shortest + 1, shortest + 2, shortest + 4, shortest + 9):
        one = result(
            engine.generate("the cat", {**constraint, "temperature": 1.0, "seed": budget, "max_new_tokens": budget})
        )
        assert len(one["output_ids"]) <= budget
        assert one["meta_info"]["complete"] == (budget >= shortest)
        if one["meta_info"]["complete"]:
            if "json_schema" in constraint:
                json.loads(one["text"])
            elif "regex" in constraint:
                assert re.fullmatch(str(constraint["regex"]), one["text"])
            else:
                assert one["text"] in constraint["choices"]  # type: ignore[operator]
