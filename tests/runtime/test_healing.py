"""The end of a prompt is written again where what follows may merge with it, and no byte of it changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niwaki.runtime import bundled
from niwaki.runtime.api import RequestError, SamplingParams, Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.healing import Healing
from niwaki.runtime.constraints.protocol import ANY_BYTE, Forced
from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_healing import agreement
from tests.toy import make_model

DOCS = Path(__file__).resolve().parents[2] / "docs"
WEB = ["see http://www.cat.org and http://dog.org", 'the {"name":"cat","kind":"dog"} sat'] * 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0, texts=WEB), kv_tokens=4096) as made:
        yield made


def result(answer: object) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return answer


def test_what_may_change_is_taken_back_and_its_text_stays(engine: Engine) -> None:
    """Whatever is drawn from the masks writes the old text first, and the tokenizer agrees with the tokens."""
    tokenizer = engine.tokenizer
    vocabulary = Vocabulary(tokenizer.token_bytes, {1}, engine.vocab_size)
    boundaries = Boundaries(vocabulary, tokenizer.plain_ids)
    draw = random.Random(5)
    text = " ".join(WEB) + (DOCS / "why.md").read_text("utf-8")
    healed = 0
    for _ in range(60):
        end = draw.randrange(20, len(text))
        prompt = text[end - 20 : end]
        ids = tokenizer.plain_ids(prompt)
        unsettled = boundaries.unsettled(ids, 0)
        if unsettled is None:
            continue
        healed += 1
        assert b"".join(vocabulary.token_bytes[i] or b"" for i in ids[-unsettled.num_tokens :]) == unsettled.text
        assert unsettled.paths[0] == tuple(ids[-unsettled.num_tokens :])
        healing = Healing(unsettled, vocabulary)
        written = b""
        while not healing.is_done:
            allowed = np.flatnonzero(np.unpackbits(healing.mask(None, 5).view(np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            written += vocabulary.token_bytes[token_id] or b""
            over = healing.accept(token_id)
        assert written == unsettled.text + over
    assert healed > 20


class LookedAtWhole(Boundaries):
    """Without what is known of places that no token reaches over."""

    def _begin_of_last_word(self, text: bytes, ends: Sequence[int]) -> int:
        return 0


@pytest.mark.parametrize("name", ["bundled", "toy"])
def test_an_end_is_looked_at_from_its_last_word_on_as_if_it_was_looked_at_whole(name: str, engine: Engine) -> None:
    tokenizer = engine.tokenizer if name == "toy" else Tokenizer(bundled.MODEL_DIR)
    vocabulary = Vocabulary(tokenizer.token_bytes, {1})
    ours, whole = Boundaries(vocabulary, tokenizer.plain_ids), LookedAtWhole(vocabulary, tokenizer.plain_ids)
    draw = random.Random(8)
    mixed = "Zoë's 12.5 km:\n\nname: 東京 🙂\t(x) -> don't\r\nA:"
    text = " ".join(WEB) + (DOCS / "why.md").read_text("utf-8") + mixed * 9
    for _ in range(80):
        end = draw.randrange(20, len(text))
        prompt = text[end - 20 : end]
        ids = tokenizer.plain_ids(prompt)
        assert ours.unsettled(ids, 0) == whole.unsettled(ids, 0), prompt
        for follow in (ANY_BYTE, b"abc", b" \n"):
            forced = Forced(prompt.encode(), follow)
            assert ours.tokens_of((), forced) == whole.tokens_of((), forced), prompt


def test_prompts_that_end_in_the_same_words_are_looked_at_once() -> None:
    tokenizer = Tokenizer(bundled.MODEL_DIR)
    num_encoded = 0

    def encode(text: str) -> list[int]:
        nonlocal num_encoded
        num_encoded += 1
        return tokenizer.plain_ids(text)

    boundaries = Boundaries(Vocabulary(tokenizer.token_bytes, {1}), encode)
    counts = []
    for text in ("I loved it.", "Never again!", "Not for 12 euros.", "So-so"):
        num_encoded = 0
        boundaries.unsettled(tokenizer.plain_ids(f"{text}\nLabel: "), 0)
        counts.append(num_encoded)
    assert counts[0] > 30
    assert max(counts[1:]) < 8


def test_a_prompt_cut_inside_a_token_goes_on_as_if_it_was_not() -> None:
    """`":"` is one token of the bundled model: behind `"name":` it is not written as `"` alone."""
    tokenizer = Tokenizer(bundled.MODEL_DIR)
    boundaries = Boundaries(Vocabulary(tokenizer.token_bytes, {1}), tokenizer.plain_ids)
    ids = tokenizer.plain_ids('{"name":')
    unsettled = boundaries.unsettled(ids, 0)
    assert unsettled is not None
    assert (unsettled.num_tokens, unsettled.text) == (1, b'":')
    assert boundaries.unsettled(tokenizer.plain_ids('{"name":"'), 0) is None  # nothing merges with `":"`
    assert boundaries.unsettled(ids, len(ids)) is None  # nothing may be taken back


def test_a_healed_text_is_one_that_the_whole_prompt_may_have(engine: Engine) -> None:
    for prompt in ("see http:", "the ca", 'a {"na', "the "):
        for seed in range(4):
            options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 5, "heal": True, "ignore_eos": True}
            one = result(engine.generate(prompt, options))
            ids = engine.tokenizer.encode([Segment(prompt)], at_start=True)
            assert len(one["output_ids"]) == 5
            assert one["meta_info"]["prompt_tokens"] <= len(ids)
            told = result(engine.generate(prompt, options, return_logprob=True))
            assert told["output_ids"] == one["output_ids"]
            assert len(told["meta_info"]["output_token_logprobs"]) == 5


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"choices": ["t", "tar", "the dog"]}, {"t", "tar", "the dog"}),
        ({"regex": "[a-c]{2}"}, {a + b for a in "abc" for b in "abc"}),
        ({"json_schema": {"enum": ["a", 1]}}, {'"a"', "1"}),
    ],
    ids=["choices", "regex", "schema"],
)
def test_constraints_begin_behind_the_boundary(constraint: dict[str, object], texts: set[str], engine: Engine) -> None:
    for prompt in ("the ca", "see http:", "a "):
        for seed in range(4):
            options = {**constraint, "temperature": 1.5, "seed": seed, "max_new_tokens": 12, "heal": True}
            one = result(engine.generate(prompt, options))
            assert one["text"] in texts
            assert one["meta_info"]["complete"]
    engine.backend.check()


def test_branches_streams_and_forks_go_on_behind_a_healed_prompt(engine: Engine) -> None:
    backend = engine.backend
    params = SamplingParams(max_new_tokens=6, seed=1, heal=True, ignore_eos=True, return_logprob=True)
    branch = backend.open()
    backend.append(branch, [Segment("the cat sat on the ma")])
    fork = backend.fork(branch)
    for one in (branch, fork):
        generation = backend.generate(one, [], params)
        (output,) = generation.result(60)
        deltas = list(generation.deltas())
        assert "".join(delta.text for delta in deltas) == output.text
        assert [i for delta in deltas for i in delta.token_ids] == list(output.token_ids)
        assert engine.tokenizer.decode(one.token_ids) == "the cat sat on the ma" + output.text
        assert list(one.token_ids[-6:]) == list(output.token_ids)
    before = list(branch.token_ids)
    backend.generate(branch, [], params).result(60)  # what the model wrote is never taken back
    assert branch.token_ids[: len(before)] == before
    before = list(fork.token_ids)
    backend.generate(fork, [Segment("<|user|>the ca", control=True)], params).result(60)  # nor a template's text
    told = engine.tokenizer.encode([Segment("<|user|>the ca", control=True)])
    assert fork.token_ids[: len(before) + len(told)] == before + told
    backend.close(branch)
    backend.close(fork)
    backend.check()
    assert engine.stats()["pages_held"] == 0


def test_healing_is_off_where_it_is_not_asked_for(engine: Engine) -> None:
    ids = engine.tokenizer.encode([Segment("see http:")], at_start=True)
    options: dict[str, object] = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    for asked in (options, options | {"heal": False}):
        assert result(engine.generate("see http:", asked))["meta_info"]["prompt_tokens"] == len(ids)
    told = engine.generate("see http:", {**options, "heal": True}, return_logprob=True, logprob_start_len=0)
    assert len(result(told)["meta_info"]["input_token_logprobs"]) == len(ids)
    with pytest.raises(RequestError, match="heal must be True or False, got 'no'"):
        engine.generate("a", {"heal": "no"})


def test_no_cut_of_a_real_text_is_healed_to_bytes_that_cannot_be() -> None:
    """How often both ways agree with the uncut text is counted by the benchmark, over 1,000 cuts."""
    with Engine(kv_tokens=16_384, dtype="float32") as engine:
        found = agreement(engine, 40, seed=3)
    assert found.inside > 0
    assert (found.impossible_healed, found.impossible_plain) == (0, 0)


def test_who_is_set_back_behind_a_healed_token_tells_no_more_of_the_prompt_than_was_asked(engine: Engine) -> None:
    backend, core = engine.backend, engine.backend._core
    set_back: list[int] = []

    def set_all_back() -> None:
        for request in list(core._roster.running.values()):
            if request.num_generated == 0 and request.num_pending == 1:  # its last token is the prompt's, healed
                set_back.append(request.id)
                core._roster.preempt(request)

    params = SamplingParams(max_new_tokens=4, ignore_eos=True, heal=True, seed=3)
    ids = [np.array(engine.tokenizer.plain_ids(text), np.int32) for text in ("see http:", "see http://www", "the {")]
    backend.after_step = set_all_back
    try:
        outputs = [backend.start(prompt, params).result(timeout=60)[0] for prompt in ids]
    finally:
        backend.after_step = lambda: None
    assert set_back
    assert [output.prompt_logprobs for output in outputs] == [()] * 3
    assert outputs == [
        replace(
            output,
            seconds=was.seconds,
            queued_seconds=was.queued_seconds,
            first_seconds=was.first_seconds,
            cached_tokens=was.cached_tokens,
        )
        for prompt, was in zip(ids, outputs, strict=True)
        for output in backend.start(prompt, params).result(timeout=60)
    ], "and the same as who was not"


def test_a_healed_prompt_that_fills_its_page_finds_another_for_its_last_token(engine: Engine) -> None:
    """What is healed is the prompt's: it takes a page, and nothing of the budget."""
    tokenizer = engine.tokenizer
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, heal=True, seed=3)
    lengths = set()
    for padding in range(16):
        ids = np.array(tokenizer.plain_ids("a" + " b" * padding + " the {"), np.int32)
        lengths.add(len(ids) % 16)
        (output,) = engine.backend.start(ids, params).result(timeout=60)
        assert len(output.token_ids) == 1
    assert len(lengths) == 16, "the prompts end at every place of a page"
