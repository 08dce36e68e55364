"""Short prompts beside long ones, and prompts beside streams that are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from niwaki.radix import TokenIds
from niwaki.runtime.api import Cancelled, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch, Runner
from niwaki.runtime.loop import roster
from niwaki.runtime.loop.filling import LEAST_PIECE
from niwaki.runtime.loop.plans import AGED_STEPS, Room, Row, Running, Waiting
from niwaki.runtime.loop.scheduler import plan
from niwaki.runtime.requests.request import Request
from tests.toy import VOCAB_SIZE, make_model

ROOM = Room(free_pages=1000, page_size=16, max_batch_tokens=512, max_running=64)


def tokens(seed: int, size: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, size, dtype=np.int32)


def prefill(id: int, size: int, num_computed: int = 0) -> Running:
    return Running(id, size, num_computed, -(-size // 16), max_new_tokens=10, ids=tokens(id, size))


def asks(id: int, size: int, *, priority: int = 0, waited_steps: int = 0) -> Waiting:
    return Waiting(id, tokens(id, size), max_new_tokens=8, priority=priority, first_step=-waited_steps)


LONG = prefill(1, 5000)


def test_who_waits_with_a_short_prompt_is_computed_beside_a_long_prefill() -> None:
    made = plan([asks(2, 3000), asks(3, 20), asks(4, 30)], [LONG], ROOM)
    assert made.rows == (Row(1, 462), Row(3, 20), Row(4, 30))
    assert made.admit == (3, 4)


def test_the_long_one_keeps_half_of_the_step() -> None:
    made = plan([asks(id, 100) for id in range(2, 12)], [LONG], ROOM)
    assert made.rows == (Row(1, 256), Row(2, 100), Row(3, 100), Row(4, 56))
    under_way = [LONG, prefill(4, 1000, 56), *(prefill(id, 1000) for id in range(5, 8))]
    assert plan([], under_way, ROOM).rows == (Row(4, 256), Row(1, 256)), "who has least left goes first"


def test_what_is_kept_for_who_is_not_admitted_after_all_is_the_long_ones() -> None:
    head = tokens(99, 200)
    alike = [Waiting(id, np.concatenate([head, tokens(id, 10)]), max_new_tokens=8) for id in range(2, 12)]
    made = plan(alike, [LONG], ROOM)
    assert made.rows == (Row(1, 302), Row(2, 210)), "the others wait for what the first of them computes"
    aged = asks(2, 3000, waited_steps=AGED_STEPS)
    waiting = [aged, *(asks(id, 100) for id in range(3, 12))]
    assert plan(waiting, [LONG], replace(ROOM, free_pages=150)).rows == (Row(1, 512),), "the pool drains for the first"


def test_one_that_was_begun_goes_before_others_that_wait() -> None:
    begun = prefill(4, 100, 56)
    assert plan([asks(5, 100)], [LONG, begun], ROOM).rows == (Row(4, 44), Row(1, 368), Row(5, 100))


def test_first_come_first_served_keeps_its_word() -> None:
    assert plan([asks(2, 20)], [LONG], ROOM, "fcfs").rows == (Row(1, 512),)


@pytest.mark.parametrize(
    ("waiting", "room"),
    [
        (asks(2, 1300), ROOM),  # not much shorter
        (asks(2, 20, priority=-1), ROOM),
        (asks(2, 20), replace(ROOM, max_running=1)),
        (asks(2, 20), replace(ROOM, free_pages=2)),  # the long one's answer takes one of them
        (Waiting(2, LONG.ids[:40], 8), ROOM),  # type: ignore[index]  # what the long one computes is its prompt, too
    ],
)
def test_nothing_is_kept_for_who_may_not_come_in(waiting: Waiting, room: Room) -> None:
    assert plan([waiting], [LONG], room).rows == (Row(1, 512),)


def test_a_prefill_that_leaves_room_anyway_is_passed_by_nobody() -> None:
    assert plan([asks(2, 20), asks(3, 60)], [prefill(1, 400)], ROOM).rows == (Row(1, 400), Row(2, 20), Row(3, 60))


def test_streams_bound_the_prompts_of_a_step_and_nothing_else() -> None:
    room = replace(ROOM, max_prompt_tokens=128)
    decoding = [Running(id, 33, 32, 3, max_new_tokens=10) for id in range(10, 210)]
    made = plan([asks(2, 300), asks(3, 20)], decoding, replace(room, max_running=300))
    assert made.rows == (*(Row(id, 1) for id in range(10, 210)), Row(2, 128))
    assert plan([asks(3, 20)], [LONG], room).rows == (Row(1, 108), Row(3, 20))
    assert plan([asks(3, 90)], [LONG], room).rows == (Row(1, 64), Row(3, 64))


@pytest.mark.parametrize(("before", "size"), [(0, 128), (1000, 64), (3000, 32), (4900, 21)])
def test_beside_streams_a_piece_of_a_prompt_is_as_much_work_however_deep_it_stands(before: int, size: int) -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=1000.0)
    assert plan([], [prefill(1, 5000, before)], room).rows == (Row(1, size),)
    cached = Waiting(1, tokens(1, 5000), max_new_tokens=8, num_cached=before)
    assert plan([cached], [], room).rows == (Row(1, size),)
    alone = replace(room, max_prompt_tokens=None)
    assert plan([], [prefill(1, 6000, before)], alone).rows == (Row(1, 512),), "where nobody reads"


def test_pieces_of_prompts_do_not_become_too_small() -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=100.0)
    assert plan([], [prefill(1, 9000, 8000)], room).rows == (Row(1, LEAST_PIECE),)
    assert plan([], [prefill(1, 9000, 8995)], room).rows == (Row(1, 5),)


def test_however_deep_prompts_stand_a_step_has_some_of_them_and_no_more_work_than_it_may() -> None:
    draw = np.random.default_rng(7)
    for _ in range(300):
        keys_per_token, budget = float(draw.choice([50, 400, 2000])), int(draw.choice([16, 64, 200]))
        room = replace(ROOM, max_prompt_tokens=budget, keys_per_token=keys_per_token, free_pages=5000)
        running = [
            prefill(id, size, int(draw.integers(0, size - 17)))
            for id, size in enumerate(draw.integers(40, 4000, draw.integers(0, 4)).tolist(), 1)
        ]
        waiting = [
            Waiting(id, tokens(id, size), max_new_tokens=8, num_cached=int(draw.integers(0, size)))
            for id, size in enumerate(draw.integers(2, 4000, draw.integers(1, 5)).tolist(), 10)
        ]
        rows = plan(waiting, running, room).rows
        begun = {each.id: (each.num_computed, each.num_pending) for each in running}
        begun |= {each.id: (each.num_cached, len(each.ids) - each.num_cached) for each in waiting}
        assert rows
        assert len({row.id for row in rows}) == len(rows)
        assert all(0 < row.num_tokens <= begun[row.id][1] for row in rows)
        work = [row.num_tokens * (1 + begun[row.id][0] / keys_per_token) for row in rows]
        least = max(LEAST_PIECE * (1 + start / keys_per_token) for start, _ in begun.values())
        assert sum(work) <= budget + least


def test_beside_a_deep_piece_there_is_room_for_short_prompts() -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=1000.0)
    deep = prefill(1, 5000, 3000)
    assert plan([asks(3, 20)], [deep], room).rows == (Row(1, 27), Row(3, 20)), (
        "108 of a text's first tokens are 27 here"
    )
    assert plan([asks(3, 90)], [deep], room).rows == (Row(1, 16), Row(3, 64))
    nearly = prefill(2, 3040, 3000)
    assert plan([asks(3, 2)], [nearly], room).rows == (Row(2, 31), Row(3, 2)), "40 more would fill the step"


@pytest.mark.parametrize("before", [8000, 30_000, 100_000])
def test_however_deep_a_long_prompt_stands_it_goes_on_and_short_ones_pass_it(before: int) -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=1000.0, free_pages=50_000)
    deep = prefill(1, before + 20_000, before)
    waiting = [asks(id, 100) for id in range(3, 12)]
    assert plan(waiting, [deep], room).rows == (Row(1, LEAST_PIECE), Row(3, 64)), "half of the step is for them"
    begun = prefill(2, 100, 20)
    assert plan(waiting, [deep, begun], room).rows == (Row(2, 62), Row(1, LEAST_PIECE))
    full = replace(room, free_pages=0)
    assert plan([], [deep, replace(begun, num_pages=7)], full).rows == (Row(2, 62), Row(1, LEAST_PIECE))
    stuck = replace(deep, num_pages=before // 16)
    assert plan([], [stuck, prefill(2, 100_020, 100_000)], full).rows == (Row(2, LEAST_PIECE),), "somebody goes on"


def test_who_has_little_left_behind_much_passes_a_long_prompt_too() -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=1000.0, free_pages=5000)
    cached = Waiting(3, tokens(3, 5005), max_new_tokens=8, num_cached=5000)
    assert plan([cached, asks(4, 20)], [LONG], room).rows == (Row(1, 78), Row(3, 5), Row(4, 20))
    assert plan([], [LONG, prefill(2, 20_020, 20_000)], room).rows == (Row(2, 3), Row(1, 65))


def test_prefills_leave_who_outranks_them_the_work_of_his_tokens() -> None:
    room = replace(ROOM, max_prompt_tokens=128, keys_per_token=1000.0, free_pages=5000)
    first = Waiting(3, tokens(3, 5020), max_new_tokens=8, num_cached=5000, priority=1)
    assert plan([first], [LONG], room).rows == (Row(1, 8), Row(3, 20))
    deeper = replace(first, ids=tokens(3, 30_020), num_cached=30_000)
    assert plan([deeper], [LONG], room).rows == (Row(3, LEAST_PIECE),)


def test_an_engine_on_a_cpu_computes_fewer_tokens_at_once_the_deeper_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = Runner.forward

    def forward(self: Runner, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        return plain(self, batch)

    with Engine(make_model(tmp_path), kv_tokens=4096, streaming_prefill_size=64, draft_tokens=0) as engine:
        keys_per_token = engine.backend._core._roster._keys_per_token
        assert keys_per_token is not None
        stream = engine.backend.start(
            tokens(3, 8), SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
        )
        next(stream.deltas())
        monkeypatch.setattr(Runner, "forward", forward)
        engine.generate(input_ids=tokens(4, 400).tolist(), sampling_params={"max_new_tokens": 1})
        assert not stream.is_done
        stream.cancel()
    pieces = [size - 1 for size in sizes if size > 1]
    assert sum(pieces) >= 400
    assert pieces[0] == 64
    assert pieces[1] == max(16, int(64 / (1 + 64 / keys_per_token))) < 64


def test_who_waited_long_goes_before_short_ones() -> None:
    made = plan([asks(2, 5000, waited_steps=AGED_STEPS), asks(3, 20)], [LONG], ROOM)
    assert made.admit[0] == 2


def test_prompts_come_in_small_pieces_while_a_stream_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "READING_SECONDS", 0.0)
    sizes: list[int] = []
    plain = Runner.forward

    def forward(self: Runner, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        return plain(self, batch)

    monkeypatch.setattr(Runner, "forward", forward)
    answer = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
    options = {"max_new_tokens": 1}
    with Engine(make_model(tmp_path), kv_tokens=4096, chunked_prefill_size=64, streaming_prefill_size=16) as engine:
        unread = engine.backend.start(tokens(1, 8), answer)
        engine.generate(input_ids=tokens(2, 200).tolist(), sampling_params=options)
        assert max(sizes) == 64, "nobody reads a stream"
        stream = engine.backend.start(tokens(3, 8), answer)
        reading = stream.deltas()
        next(reading)
        sizes.clear()
        engine.generate(input_ids=tokens(4, 200).tolist(), sampling_params=options)
        assert not stream.is_done
        assert max(sizes) <= 16 + 2
        for generation in (unread, stream):
            generation.cancel()
            with pytest.raises(Cancelled):
                generation.result(timeout=60)  # else a step of theirs may still come
        sizes.clear()
        next(engine.backend.start(tokens(6, 200), SamplingParams(max_new_tokens=8)).deltas())
        assert sizes[:3] == [64, 64, 64], "its own prompt holds nobody up"
        sizes.clear()
        engine.generate(input_ids=tokens(5, 200).tolist(), sampling_params=options)
        assert max(sizes) == 64


def test_a_stream_that_waits_makes_pieces_small_whenever_somebody_began_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "READING_SECONDS", 0.0)
    answer = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
    options = {"max_running_requests": 1, "chunked_prefill_size": 64, "streaming_prefill_size": 16}
    with Engine(make_model(tmp_path), kv_tokens=4096, **options) as engine:
        backend = engine.backend
        core = backend._core
        monkeypatch.setattr(core, "step", lambda: None)
        told: list[int | None] = []
        may_go = threading.Event()

        def bound() -> int | None:
            return core._roster._prompt_tokens(time.perf_counter())

        def ask() -> None:
            """On the engine's thread, behind what was posted before."""
            backend._inbox.post(lambda: told.append(bound()))

        def hold() -> None:
            may_go.wait(60)

        backend.start(tokens(1, 8), answer)
        waits = backend.start(tokens(2, 8), answer)
        ask()
        backend.check()
        assert told == [None], "nobody reads"
        waits.begin_reading()
        ask()
        backend.check()
        assert told[1:] == [16], "one who waits is read"
        waits.cancel()
        ask()
        backend.check()
        assert told[2:] == [None], "he is gone"
        submit = core.submit

        def looked_for_before(requests: Sequence[Request]) -> None:
            late.begin_reading()
            bound()  # which does not find him yet
            submit(requests)

        monkeypatch.setattr(core, "submit", looked_for_before)
        backend._inbox.post(hold)
        late = backend.start(tokens(3, 8), answer)
        may_go.set()
        ask()
        backend.check()
        assert told[3:] == [16], "he was read before he stood in line"
