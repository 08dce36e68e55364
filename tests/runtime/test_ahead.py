"""A step that is launched before the tokens of the last one are read gives what steps in turn give. On a GPU this is
the default; here it is switched on, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from niwaki.kernels.sample import Longs, Words
from niwaki.runtime.api import (
    Cancelled,
    ConstraintError,
    Delta,
    GenerationError,
    JsonSchema,
    Regex,
    SamplingParams,
)
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.loop import ahead
from niwaki.runtime.loop.ahead import Flight
from niwaki.runtime.loop.decoding import Decoding
from niwaki.runtime.loop.untold import Taken
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import NO_ROWS
from tests.formula import Host, mixed
from tests.runtime.test_late import every_step_takes_all_it_computed
from tests.toy import make_model

GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, top_p=0.9)
PLAIN = [
    GREEDY,
    DRAWN,
    replace(GREEDY, max_new_tokens=150),  # text in several portions
    replace(DRAWN, ignore_eos=False, max_new_tokens=90),
    replace(DRAWN, stop=("a", "e")),
    replace(DRAWN, stop_token_ids=(7, 11, 19, 23)),
    replace(DRAWN, max_new_tokens=1),
    replace(DRAWN, top_k=5, min_p=0.1, max_new_tokens=33),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    happened: list[str] = []
    read, of = Flight.read, Flight.of

    def reads(flight: Flight, requests: Sequence[Request]) -> object:
        happened.append("read")
        return read(flight, requests)

    def launches(
        requests: Sequence[Request],
        drawing: ahead.Drawing,
        logits: torch.Tensor,
        masked: Longs = NO_ROWS,
        masks: Sequence[Words] = (),
    ) -> Flight:
        happened.append("launch masked" if len(masks) else "launch")
        return of(requests, drawing, logits, masked, masks)

    monkeypatch.setattr(Flight, "read", reads)
    monkeypatch.setattr(Flight, "of", launches)
    return happened


@pytest.mark.parametrize("num_pages", [400, 62], ids=["roomy", "short"])
def test_running_ahead_gives_what_steps_in_turn_give(num_pages: int, folder: Path, order: list[str]) -> None:
    host, calm = Host(folder, num_pages, runs_ahead=True), Host(folder, num_pages)
    outputs = mixed(host, PLAIN)
    assert order.count("launch") > 50
    launched = len(order)
    assert outputs == mixed(calm, PLAIN)
    assert len(order) == launched, "nobody runs ahead who was not told to"
    ends = {output.finish_reason.type for output in outputs}
    assert ends == {"stop", "length"}, "known one step late, and known before"
    counters = [replace(each.core.counters, steps=0, recomputed_tokens=0) for each in (host, calm)]
    assert counters[0] == counters[1]
    assert (num_pages == 62) == (host.core.counters.preemptions > 0)


SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "n": {"type": "integer"}},
"required": ["name", "n"]}"""
LED = [
    replace(GREEDY, constraint=Regex("[a-z ]{20,60}[.]")),
    replace(DRAWN, constraint=Regex("[a-z ]{20,60}[.]"), max_new_tokens=70),
    GREEDY,
    replace(DRAWN, constraint=Regex("([a-z]{3,8} ){6,9}end"), max_new_tokens=90),
    DRAWN,
    replace(DRAWN, constraint=Regex("(alpha|beta|gamma)( [0-9]{4,9}){5}"), max_new_tokens=120),
    replace(DRAWN, constraint=Regex("[a-z]*"), max_new_tokens=25, ignore_eos=False),
    replace(DRAWN, constraint=JsonSchema(SCHEMA), max_new_tokens=90),
]


@pytest.mark.parametrize("num_pages", [400, 42], ids=["roomy", "short"])
def test_under_masks_running_ahead_gives_what_steps_in_turn_give(
    num_pages: int, folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_step_takes_all_it_computed(monkeypatch)  # else who runs when, and whether pages run short, hangs on the clock
    host, calm = Host(folder, num_pages, runs_ahead=True), Host(folder, num_pages)
    outputs = mixed(host, LED)
    assert order.count("launch masked") > 20
    launched = len(order)
    assert outputs == mixed(calm, LED)
    assert len(order) == launched
    counters = [replace(each.core.counters, steps=0, recomputed_tokens=0) for each in (host, calm)]
    assert counters[0] == counters[1]
    assert (num_pages == 42) == (host.core.counters.preemptions > 0)


def test_a_step_under_masks_is_launched_before_the_tokens_that_they_hang_on_are_read(
    folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(folder, runs_ahead=True)
    whole = host.runner.forward

    def forward(batch: Batch) -> torch.Tensor:
        if batch.drawn is not None:
            order.append("forward")
        return whole(batch)

    monkeypatch.setattr(host.runner, "forward", forward)
    for length in (5, 9, 14):
        host.submit(replace(GREEDY, constraint=Regex("[a-z ]{20,60}")), length)
    host.run()
    assert order[:7] == ["launch masked", "forward", "read", "launch masked", "forward", "read", "launch masked"]
    assert order.count("forward") > 20


def test_a_token_that_leaves_no_room_for_an_ending_is_drawn_again(
    folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits that it was drawn from are those of another step by then."""
    refused: list[int] = []

    def looked_over(decoding: Decoding, tokens: Longs) -> Taken:
        taken = whole(decoding, tokens)
        if decoding.num_steps == 9 and decoding.is_led and len(decoding.requests) == 4 and not refused:
            refused.append(decoding.requests[1].id)
            decoding.requests[1].matcher.rollback(1)  # type: ignore[union-attr]  # it is led
            return replace(taken, one_by_one=[1])
        return taken

    host, calm = Host(folder, runs_ahead=True), Host(folder)
    for each in (host, calm):
        for length in (5, 9, 14, 7):
            each.submit(replace(DRAWN, constraint=Regex("[a-z ]{40,60}"), max_new_tokens=50), length)
    expected = calm.run()
    whole = Decoding._looked_over
    monkeypatch.setattr(Decoding, "_looked_over", looked_over)
    assert host.run() == expected, "the same token, since its number hangs on its position alone"
    assert refused == [1]


def test_a_matcher_that_fails_under_way_fails_alone(folder: Path, order: list[str]) -> None:
    host, calm = Host(folder, runs_ahead=True), Host(folder)
    params = replace(DRAWN, constraint=Regex("[a-z ]{30,60}"), max_new_tokens=50)
    for each in (host, calm):
        for length in (5, 9, 14, 7):
            each.submit(params, length)
    while not order:
        host.step()
    assert host.core._decoding is not None
    broken = host.core._decoding.requests[2]

    whole = broken.matcher

    class Broken:
        """The matcher, but for its masks."""

        def known_mask(self, remaining: int) -> None: ...

        def fill_mask(self, row: object) -> None:
            raise ConstraintError("its grammar has no more memory")

        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

    broken.matcher = Broken()  # type: ignore[assignment]
    host.core._decoding._look_at_kinds()
    while host.core.has_work:
        host.step()
    assert isinstance(host.generations.pop(2).error(), ConstraintError)
    assert host.run() == [output for index, output in enumerate(calm.run()) if index != 2]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(folder: Path, order: list[str]) -> None:
    host = Host(folder, runs_ahead=True)
    for length in (5, 9, 14):
        host.submit(GREEDY, length)
    host.run()
    assert order[:6] == ["launch", "launch", "read", "launch", "read", "launch"]
    assert order.count("launch") == order.count("read"), "who ends with his budget is in no step behind it"
    assert order.count("launch") > 30


def test_no_step_is_lost_where_others_come_and_wait(folder: Path, order: list[str]) -> None:
    host = Host(folder, runs_ahead=True)
    for index in range(12):
        host.submit(replace(GREEDY, max_new_tokens=9 + 2 * index), 5)
    while host.core.num_waiting > 2 or host.core._decoding is None or host.core._decoding.flight is None:
        host.step()
    host.submit(GREEDY, 7)
    assert order.count("launch") == order.count("read") + 1, "it finds no place: the step goes on"
    host.submit(replace(GREEDY, priority=1), 7)
    assert order.count("launch") == order.count("read")
    host.run()
    assert order.count("launch") == order.count("read")


def test_the_last_ones_may_end_in_one_step(folder: Path, order: list[str]) -> None:
    host = Host(folder, runs_ahead=True)
    for budget in (20, 21, 21):
        host.submit(replace(GREEDY, max_new_tokens=budget), 5)
    assert [len(output.token_ids) for output in host.run()] == [20, 21, 21]
    assert order.count("launch") == order.count("read") > 10


def test_who_is_drawn_one_by_one_does_not_run_ahead(folder: Path, order: list[str]) -> None:
    host = Host(folder, runs_ahead=True)
    for params in (GREEDY, DRAWN, replace(DRAWN, repetition_penalty=1.2)):
        host.submit(replace(params, max_new_tokens=40 + len(host.jobs)), 5)
    host.run()
    assert order == []


def write_down(
    script: npt.NDArray[np.int64], host: Host, monkeypatch: pytest.MonkeyPatch, order: list[str] | None = None
) -> None:
    """Whatever is asked of this host, it writes the script; `order` is told of guesses."""
    vocab = host.runner.config.vocab_size

    def forward(batch: Batch) -> torch.Tensor:
        spans = batch.spans
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(spans.starts, spans.counts, strict=True)])
        if order is not None and positions[0] > 5 and len(positions) > len(spans):
            order.append("guess")
        positions = positions if batch.wanted is None else positions[batch.wanted]
        return torch.nn.functional.one_hot(torch.from_numpy(script[positions]), vocab).float()

    monkeypatch.setattr(host.runner, "forward", forward)


def that_repeats_itself(new: int, again: int) -> npt.NDArray[np.int64]:
    """So many new tokens, then so many of them again, and so on."""
    fresh = np.random.default_rng(8).permutation(np.arange(70, 390))
    parts = [fresh[at : at + size] for at in range(0, len(fresh) - new, new) for size in (new, again)]
    return np.concatenate(parts)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_run_ahead_while_their_texts_say_nothing_again_and_guess_once_they_do(
    count: int, folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = that_repeats_itself(40, 12)
    host, calm = Host(folder, runs_ahead=True), Host(folder)
    for each in (host, calm):
        write_down(script, each, monkeypatch, order)
        for _ in range(count):
            each.submit(replace(GREEDY, max_new_tokens=240), 5)
    told = [replace(output, drafted=()) for output in host.run()]
    assert all(output.token_ids == tuple(script[4:244].tolist()) for output in told)
    for at in [at for at, what in enumerate(order) if what == "guess"]:
        assert order[:at].count("launch") == order[:at].count("read"), "a guess is made of tokens that are read"
    assert order.count("launch") > 90
    assert host.core.counters.drafted_tokens > 20 * count
    order.clear()
    assert told == [replace(output, drafted=()) for output in calm.run()]
    assert order == ["guess"] * len(order)


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_what_is_forced_in_the_text_of_the_only_one_that_runs_ahead_ends_the_batch_alone(
    num_requests: int, folder: Path, order: list[str]
) -> None:
    """Text is made of 64 steps' tokens at once, behind which the batch goes on."""
    params = replace(DRAWN, max_new_tokens=200, constraint=Regex("[a-z]{260}-the cat sat on the mat-[a-z]{10}"))
    outputs = []
    for runs_ahead in (False, True):
        order.clear()
        host = Host(folder, runs_ahead=runs_ahead)
        for _ in range(num_requests):
            host.submit(params, 9)
        outputs.append(host.run())
    assert outputs[0] == outputs[1]
    assert "launch masked" in order


def test_who_guesses_often_does_not_run_ahead(folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(folder, runs_ahead=True)
    write_down(that_repeats_itself(10, 9), host, monkeypatch)
    host.submit(replace(GREEDY, max_new_tokens=200), 5)
    host.run()
    assert order == []
    assert host.core.counters.drafted_tokens > 30


def test_whoever_reads_is_told_every_token_and_none_twice(folder: Path) -> None:
    host = Host(folder, runs_ahead=True)
    generation, *_ = [host.submit(replace(DRAWN, ignore_eos=False), length) for length in (5, 9, 14)]
    for _ in range(10):
        host.step()
    deltas: list[Delta] = []
    generation.add_delta_callback(deltas.append)
    host.run()
    (output,) = generation.result()
    assert [i for delta in deltas for i in delta.token_ids] == list(output.token_ids)
    assert "".join(delta.text for delta in deltas) == output.text


def test_a_cancelled_request_leaves_and_the_others_go_on(folder: Path) -> None:
    host, calm = Host(folder, runs_ahead=True), Host(folder)
    for each in (host, calm):
        for length in (5, 9, 14, 7):
            each.submit(DRAWN, length)
    for _ in range(20):
        host.step()
    assert host.core._decoding is not None
    assert host.core._decoding.flight is not None
    host.core.abort(host.jobs[1])
    assert isinstance(host.generations[1].error(), Cancelled)
    host.core.pages.cache.check()
    del host.generations[1]
    assert host.run() == [output for index, output in enumerate(calm.run()) if index != 1]


def test_a_model_that_fails_fails_the_batch_and_gives_its_pages_back(folder: Path, order: list[str]) -> None:
    host = Host(folder, runs_ahead=True)
    generations = [host.submit(GREEDY, length) for length in (5, 9, 12)]
    host.runner.broken_at = 20
    while host.core.has_work:
        host.step()
    assert all(isinstance(generation.error(), GenerationError) for generation in generations)
    assert host.core.counters.failed == 3
    assert host.core.pages.cache.stats().held_pages == 0
    assert order.count("launch") == order.count("read") + 1, "what was under way is not waited for"


def test_a_device_that_fails_where_it_is_waited_for_fails_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(folder, runs_ahead=True)
    generations = [host.submit(GREEDY, length) for length in (5, 9, 12)]
    for _ in range(10):
        host.step()

    def fail(flight: Flight, requests: Sequence[Request]) -> object:
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(Flight, "read", fail)
        host.step()
    assert host.core.num_running == 0
    assert all("device-side assert" in str(generation.error()) for generation in generations)
    assert host.core.counters.failed == 3
    assert host.core.pages.cache.stats().held_pages == 0
    after = host.submit(GREEDY, 5)
    while host.core.has_work:
        host.step()
    assert len(after.result()[0].token_ids) == GREEDY.max_new_tokens


def test_a_row_that_is_not_finite_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, calm = Host(folder, runs_ahead=True), Host(folder)
    for each in (host, calm):
        for length in (9, 12, 15, 18):
            each.submit(DRAWN, length)
    whole = host.runner.forward

    def broken(batch: Batch) -> torch.Tensor:
        logits = whole(batch)
        logits[(torch.from_numpy(batch.spans.starts) == 24) & (len(logits) == 4)] = float("nan")
        return logits

    monkeypatch.setattr(host.runner, "forward", broken)
    while host.core.has_work and host.core.counters.failed == 0:
        host.step()
    monkeypatch.setattr(host.runner, "forward", whole)
    (failed,) = [index for index, generation in enumerate(host.generations) if generation.error()]
    assert isinstance(host.generations.pop(failed).error(), GenerationError)
    assert host.run() == [output for index, output in enumerate(calm.run()) if index != failed]


def test_what_a_superfluous_step_writes_harms_nobody(tmp_path: Path, order: list[str]) -> None:
    """On a real model, bit by bit, in a pool that is short: texts on shared prefixes, found in the cache again."""
    model = make_model(tmp_path, sharpness=4.0)
    generator = np.random.default_rng(3)
    shared = generator.integers(5, 300, 21).tolist()
    prompts = [shared + generator.integers(5, 300, 2 + index).tolist() for index in range(7)]
    params: list[dict[str, object]] = [
        {"temperature": 0.8, "max_new_tokens": 20 + 7 * index, "seed": index, "stop_token_ids": list(range(5, 8))}
        for index in range(7)
    ]

    def texts(runs_ahead: bool) -> list[list[int]]:
        with Engine(model, kv_tokens=160, page_size=4, deterministic=True) as engine:
            engine.backend._core._runs_ahead = runs_ahead
            written: list[list[int]] = []
            for _ in range(3):
                answers = engine.generate(input_ids=prompts, sampling_params=params)
                assert isinstance(answers, list)
                for answer in answers:
                    assert isinstance(answer["output_ids"], list)
                    written.append(answer["output_ids"])
            assert engine.stats()["cached_tokens"] > 0
            assert engine.stats()["evicted_pages"] > 0
            return written

    expected = texts(False)
    assert order == []
    assert texts(True) == expected
    assert order.count("launch") > 50
    assert expected[:7] == expected[7:14] == expected[14:]
    assert len({len(ids) for ids in expected}) > 2, "they end at different steps"
