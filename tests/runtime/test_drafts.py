"""Drafts: what a text repeats is guessed, checked in one step, and changes no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from niwaki.kernels.echo import last_echo
from niwaki.runtime.api import Cancelled, ConfigError, JsonSchema, Output, Regex, SamplingParams, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.loop.decoding import Decoding
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import (
    DRAFT_ROWS,
    FIRST_GUESS,
    LONGEST_PAUSE,
    OWN_ECHO,
    OWN_RIGHT,
    ROOM,
    Guesser,
    Listener,
    said_behind,
)
from tests.toy import make_model

ITEMS = '{"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 9}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.05},
    "hot": {"temperature": 1.0, "top_k": 40},
    "stop": {"temperature": 0.0, "stop": ("a",)},
    "regex": {"temperature": 0.3, "constraint": Regex("(the (cat|dog) sat on the (mat|log)[, ]){1,9}")},
    "schema": {"temperature": 0.3, "constraint": JsonSchema(ITEMS)},
    "plain no more": {"temperature": 0.0, "frequency_penalty": 0.5},
    "told": {"temperature": 0.0, "return_logprob": True},
}


def ids_of(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


# ---------------------------------------------------------------------------------------------------------------
# What is guessed
# ---------------------------------------------------------------------------------------------------------------


def test_an_echo_is_found_where_looking_everywhere_finds_it() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        ids = [draw.randrange(3) for _ in range(draw.randint(1, 24))]
        size = draw.randint(1, 4)
        ends = [end for end in range(size, len(ids)) if ids[end - size : end] == ids[-size:]]
        expected = ends[-1] if ends and len(ids) >= size else 0
        assert last_echo(ids_of(*ids), size) == expected


def test_the_guess_is_what_followed_the_last_time() -> None:
    ids = ids_of(1, 2, 3, 7, 8, 1, 2, 3, 9, 5, 6, 4, 1, 2, 3)
    assert Guesser().guess(ids, 3, 3).tolist() == [9, 5, 6]
    assert Guesser().guess(ids, 1, 3).tolist() == [9]
    assert Guesser().guess(ids, 0, 3).tolist() == []
    assert Guesser().guess(ids[:-1], 3, 3).tolist() == []


def test_what_a_text_wrote_itself_must_have_said_more_again_until_a_guess_was_right() -> None:
    own = ids_of(9, 1, 2, 3, 7, 8, 6, 5, 1, 2, 3)
    guesser = Guesser()
    assert guesser.guess(own, 2, 3, 4).tolist() == [7, 8], "three tokens of the prompt are enough"
    assert guesser.guess(own, 2, 3, 3).tolist() == [], "the last of the three is its own"
    longer = ids_of(9, *range(1, 1 + OWN_ECHO), 7, 8, *range(1, 1 + OWN_ECHO))
    assert guesser.guess(longer, 2, 3, 1).tolist() == [7, 8]
    guesser.learn(4, OWN_RIGHT - 1, len(longer))
    assert guesser.quiet_until > len(longer), "too few were right"
    assert guesser.guess(own, 2, 3, 1).tolist() == []
    guesser.quiet_until = 0
    assert guesser.guess(longer, 2, 3, 1).tolist() == [7, 8]
    guesser.learn(4, OWN_RIGHT, len(longer))
    assert guesser.guess(own, 2, 3, 1).tolist() == [7, 8], "it has said something again"
    assert guesser.guess(longer, 2, 3, 20).tolist() == [7, 8]
    guesser.learn(4, 1, len(longer))
    assert guesser.quiet_until == 0, "of the prompt one is enough"


def hears(guesser: Guesser, ids: TokenIds) -> bool:
    """Beside a text that repeats nothing."""
    listener = Listener([ids[:-1], ids_of(1, 2)], [guesser, Guesser()])
    return listener.hears(np.array([len(ids) - 1, 2]), ids_of(int(ids[-1]), 3))


def test_right_guesses_grow_and_wrong_ones_make_a_pause() -> None:
    ids = ids_of(*[1, 2, 3, 4] * 40)
    guesser = Guesser()
    sizes = []
    for _ in range(4):
        guess = guesser.guess(ids, 30, 3)
        sizes.append(len(guess))
        guesser.learn(len(guess), len(guess), len(ids))
    assert sizes == [4, 7, 15, 30], "with the token before it whole blocks"
    pauses = []
    for _ in range(4):
        guesser.learn(4, 0, 80)
        length = 80
        while not len(guesser.guess(ids[:length], 30, 3)):
            assert not hears(guesser, ids[:length])
            length += 1
        assert hears(guesser, ids[:length])
        pauses.append(length - 80)
    assert pauses == [4, 16, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len(guesser.guess(ids, 30, 3)) == FIRST_GUESS
    guesser.learn(3, 1, 80)
    guesser.learn(3, 0, 80)
    assert len(guesser.guess(ids[:84], 30, 3)) > 0, "one that was right ends the series"


def test_what_is_said_is_the_guess_as_far_as_it_was_drawn_and_a_token_more() -> None:
    guesses = [ids_of(4, 5, 6), ids_of(), ids_of(7, 8)]
    assert said_behind(guesses, np.array([4, 5, 6, 9, 3, 1, 8, 2])) == [[4, 5, 6, 9], [3], [1]]
    assert said_behind(guesses, np.array([4, 0, 6, 9, 3, 7, 1, 2])) == [[4, 0], [3], [7, 1]]


def test_a_text_that_grows_by_a_guess_is_heard_as_one_that_grows_token_by_token() -> None:
    ids = ids_of(1, 2, 3, 4, 1, 2, 3)
    guesser = Guesser()
    listener = Listener([ids[:4]], [guesser])
    assert not listener.hears(np.array([4]), ids[4:5])
    assert listener.takes(0, ids[:6], guesser)
    assert listener.hears(np.array([6]), ids[6:])
    guesser.be_quiet()
    assert listener.takes(0, ids, guesser)
    assert not listener.hears(np.array([6]), ids[6:])
    assert not listener.takes(0, np.zeros(1000, np.int32), guesser), "it has no room"


@pytest.mark.parametrize("grows_by", [1, 7])
def test_a_listener_has_room_as_long_as_the_next_token_has_a_place(grows_by: int) -> None:
    length, guesser = 5, Guesser()
    listener = Listener([np.arange(length, dtype=np.int32), ids_of(1)], [guesser, guesser])
    while listener.has_room:
        assert length <= 4 + ROOM
        listener.hears(np.array([length - 1, 0]), ids_of(9, 9))
        length += grows_by
        if grows_by > 1 and not listener.takes(0, np.arange(length, dtype=np.int32), guesser):
            break
    assert length > ROOM - 8


# ---------------------------------------------------------------------------------------------------------------
# What comes of it
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the last one alone: its texts soon go round."""
    made = make_model(tmp_path_factory.mktemp("toy"), sharpness=2.0, texts=["the cat sat, the dog sat, the cat sat"])
    weights = load_file(made / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Engine]:
    """As of a large model, where two at once guess."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niwaki.runtime.host.load.is_small", lambda *_: False)
        made = Engine(folder, kv_tokens=4096, deterministic=True)
    with made:
        yield made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv_tokens=4096, deterministic=True, draft_tokens=0) as made:
        yield made


def said(engine: Engine, kind: str, seed: int, count: int = 1, num_outputs: int = 1) -> list[Output]:
    """`count` requests side by side, on texts that repeat themselves."""
    draw = random.Random(f"{kind} {seed}")
    running = []
    for number in range(count):
        head = draw.choices(range(5, 400), k=draw.randint(4, 12))
        ids = np.array(head * 3 + head[: draw.randint(1, 3)], np.int32)
        params = SamplingParams(max_new_tokens=draw.randint(20, 60), seed=seed + number, n=num_outputs, **KINDS[kind])
        running.append(engine.backend.start(ids, params))
    return [output for generation in running for output in generation.result(60)]


def same(first: Output, second: Output) -> bool:
    return (first.token_ids, first.text, first.finish_reason, first.complete, first.forced, first.logprobs) == (
        second.token_ids,
        second.text,
        second.finish_reason,
        second.complete,
        second.forced,
        second.logprobs,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: str, drafting: Engine, plain: Engine) -> None:
    drafted = 0
    for seed in range(4):
        for count, num_outputs in ((1, 1), (3, 1), (1, 2), (DRAFT_ROWS + 2, 1)):
            here = said(drafting, kind, seed, count, num_outputs)
            there = said(plain, kind, seed, count, num_outputs)
            assert all(map(same, here, there))
            assert not any(output.drafted for output in there)
            drafted += sum(len(output.drafted) for output in here)
    if kind in ("greedy", "cool", "regex"):
        assert drafted > 0
    if kind in ("plain no more", "told"):
        assert drafted == 0, "only what is drawn as it is"
    drafting.backend.check()


def guessed(engine: Engine, count: int) -> float:
    before = engine.stats()["guessed_tokens"]
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    engine.generate(input_ids=[[7, 8, 9] * 4 + [place] for place in range(7, 7 + count)], sampling_params=params)
    return engine.stats()["guessed_tokens"] - before


def test_of_a_small_model_one_guesses_and_of_a_large_one_two(folder: Path, drafting: Engine) -> None:
    with Engine(folder, kv_tokens=4096) as small:
        assert [guessed(small, count) > 0 for count in (1, 2, 3)] == [True, False, False]
    assert [guessed(drafting, count) > 0 for count in (1, 2, 3)] == [True, True, False]


def test_a_draft_saves_as_many_steps_as_it_has_right_tokens(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)
    with Engine(folder, kv_tokens=4096) as engine:
        (output,) = engine.backend.start(ids_of(7, 8, 9), params).result(60)
    stats = engine.stats()
    assert stats["steps"] == stats["generated_tokens"] - stats["drafted_tokens"] == 120 - len(output.drafted)
    assert 0 < stats["drafted_tokens"] <= stats["guessed_tokens"]


@pytest.mark.parametrize("kind", ["greedy", "cool"])
def test_guesses_are_checked_in_a_batch_that_stays_arrays(
    kind: str, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = [], EngineCore._begin_decoding

    def counted(core: EngineCore, last: Decoding | None = None, **more: int) -> None:
        begun.append(last)
        begin(core, last, **more)

    monkeypatch.setattr(EngineCore, "_begin_decoding", counted)
    before = drafting.stats()["drafted_tokens"]
    params = SamplingParams(max_new_tokens=120, seed=1, ignore_eos=True, **KINDS[kind])
    drafting.backend.start(ids_of(7, 8, 9, 7, 8, 9), params).result(60)
    assert drafting.stats()["drafted_tokens"] > before + 40
    assert len(begun) <= 3, "behind the prompt, and where the text ends"


def test_an_output_says_which_tokens_were_drafted_and_where_they_stand(drafting: Engine) -> None:
    outputs = [output for seed in range(20) for output in said(drafting, "regex", seed)]
    marked = 0
    for output in outputs:
        assert not set(output.drafted) & set(output.forced)
        assert list(output.drafted) == sorted(set(output.drafted))
        if output.drafted_spans:
            told = "".join(output.text[start:end] for start, end in output.drafted_spans)
            assert told.encode() in drafting.tokenizer.decode([output.token_ids[i] for i in output.drafted]).encode()
            marked += 1
    assert marked > 3


def test_a_streamed_text_is_the_sum_of_its_deltas(drafting: Engine) -> None:
    before = drafting.stats()["drafted_tokens"]
    for seed in range(4):
        head = random.Random(seed).choices(range(5, 400), k=6)
        params = SamplingParams(max_new_tokens=40, temperature=0.0, seed=1)
        generation = drafting.backend.start(np.array(head * 3, np.int32), params)
        deltas = list(generation.deltas(60))
        (output,) = generation.result(60)
        assert "".join(delta.text for delta in deltas) == output.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == output.token_ids
    assert drafting.stats()["drafted_tokens"] > before


def test_drafts_survive_a_pool_that_is_short_and_requests_that_are_cancelled(folder: Path, plain: Engine) -> None:
    draw = random.Random(4)
    with Engine(folder, kv_tokens=112, chunked_prefill_size=16, deterministic=True) as tight:
        for seed in range(6):
            heads = [draw.choices(range(5, 400), k=7) for _ in range(4)]
            params = [SamplingParams(max_new_tokens=50, temperature=0.0, seed=seed, ignore_eos=True) for _ in heads]
            asked = [np.array(head * 2, np.int32) for head in heads]
            running = [tight.backend.start(ids, one) for ids, one in zip(asked, params, strict=True)]
            running[seed % 4].cancel()
            for number, generation in enumerate(running):
                try:
                    (output,) = generation.result(60)
                except Cancelled:
                    assert number == seed % 4
                    continue
                (alone,) = plain.backend.start(asked[number], params[number]).result(60)
                assert same(output, alone)
            tight.backend.check()
        assert tight.stats()["drafted_tokens"] > 0
        assert tight.stats()["preemptions"] > 0


@pytest.mark.parametrize("value", [-1, 1.5, True, 10_000])
def test_so_many_tokens_cannot_be_guessed(value: object, folder: Path) -> None:
    with pytest.raises(ConfigError, match="draft_tokens must be a whole number from 0 to 256"):
        Engine(folder, draft_tokens=value)


def test_guesses_behind_a_healed_prompt_leave_each_sample_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sample's last page of the prompt is replaced by the first one's equal one while a guess is checked."""
    monkeypatch.setattr("niwaki.runtime.host.load.is_small", lambda *_: False)  # two guess at once
    model = make_model(tmp_path / "toy", sharpness=3.0)
    text = "the cat sat on the mat and the dog sat on the log. "
    params = SamplingParams(max_new_tokens=12, n=2, temperature=0.0, ignore_eos=True, heal=True)
    told: list[list[tuple[int, ...]]] = []
    for draft_tokens in (0, 15):
        with Engine(model, kv_tokens=512, page_size=4, deterministic=True, draft_tokens=draft_tokens) as engine:
            branch = engine.backend.open()
            for piece in (text, "a b c 1 2 3 yes no maybe"):
                engine.backend.append(branch, [Segment(piece)])
            outputs = engine.backend.generate(branch, [Segment(text)], params).result(timeout=60)
            told.append([output.token_ids for output in outputs])
            assert (engine.stats()["guessed_tokens"] > 0) == (draft_tokens > 0)
    assert told[0] == told[1]
