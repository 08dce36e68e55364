"""A small step in one native call gives what its kernels give one by one, whoever helps with it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from niwaki.kernels import crew, pieces
from niwaki.kernels.segments import Costs, Int32s, Int64s
from niwaki.kernels.tiles import has_matrix_unit, has_tiles
from niwaki.kernels.vector_tiles import multiplies_pairs
from niwaki.runtime.forward import runner as forward
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.models import stack
from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig, Temperature
from niwaki.runtime.models.stack import Stack
from niwaki.runtime.models.workspace import Workspace
from tests.lang.waiting import wait_until

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this processor has no kernels for whole steps")

PAGES = 256
LLAMA = ModelConfig(
    vocab_size=208,
    num_layers=3,
    hidden_size=96,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    context_length=512,
    dtype="bfloat16",
)
PLAIN = {
    "llama": LLAMA,
    "one kv head": replace(LLAMA, num_kv_heads=1),
    "biases, tied": replace(LLAMA, qkv_bias=True, tie_embeddings=True),
    "norms of heads": replace(LLAMA, qk_norm="head"),
    "wide heads": replace(LLAMA, head_dim=128, num_layers=1),
    "queries that do not grow yet": replace(LLAMA, temperature=Temperature(0.3, 600, 0.0, is_everywhere=True)),
}
OTHERS = {
    "float32": replace(LLAMA, dtype="float32"),
    "narrow heads": replace(LLAMA, head_dim=16),
    "gelu": replace(LLAMA, activation="gelu_tanh"),
    "windows": replace(LLAMA, layers=(LayerKind(window=20),) * 3),
    "caps": replace(LLAMA, attention_cap=30.0),
    "scaled residuals": replace(LLAMA, residual_scale=0.5),
    "experts": replace(
        LLAMA,
        experts=Experts(count=4, per_token=2, width=96, renormalise=True),
        layers=(LayerKind(is_sparse=True),) * 3,
    ),
}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three, even for little work."""
    before = torch.get_num_threads()
    monkeypatch.setattr(stack, "WORK_OF_A_THREAD", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def runner_of(config: ModelConfig) -> Runner:
    return Runner.random(config, num_pages=PAGES)


def kernel_by_kernel(config: ModelConfig) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "of", lambda *given: None)
        return runner_of(config)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that was one call."""
    found: list[int] = []
    run = crew.Crew.run

    def watched(self: crew.Crew, *given: object) -> None:
        found.append(given[1].num_tokens)  # type: ignore[attr-defined]  # the plan
        run(self, *given)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(crew.Crew, "run", watched)
    return found


def script(seed: int) -> list[list[Row]]:
    """A prompt, then steps behind it: alone, as a tree, long and short rows, with all, some and no logits."""
    draw = np.random.default_rng(seed)

    def row(start: int, count: int, own: int, num_logits: int = 1) -> Row:
        shared = list(range(min(start, 128) // 16))
        return Row(draw.integers(0, 200, count).astype(np.int32), start, [*shared, *range(own, own + 5)], num_logits)

    return [
        [Row(draw.integers(0, 200, 100).astype(np.int32), 0, list(range(8)), 0)],
        [Row(draw.integers(0, 200, 28).astype(np.int32), 100, list(range(8)), 5)],
        [row(128, 1, 8)],
        [row(128, 1, 8), row(128, 1, 13)],
        [row(128, 1, 8 + 5 * i) for i in range(9)],
        [row(128, 1, 8 + 5 * i) for i in range(40)],
        [row(128, 33 if i < 3 else 1, 8 + 5 * i, 2 if i == 1 else 1) for i in range(12)],
        [row(128, 2, 8 + 5 * i, 2 if i else 0) for i in range(3)],
        [row(0, 5, 100), row(0, 40, 120)],
    ]


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_one_call_gives_what_its_kernels_give(config: ModelConfig, steps: list[int]) -> None:
    at_once, apart = runner_of(config), kernel_by_kernel(config)
    for rows in script(1):
        got, wanted = at_once.forward(rows), apart.forward(rows)
        torch.testing.assert_close(got, wanted, atol=0.06, rtol=0.05)  # a few roundings of bfloat16
    assert steps == [sum(len(row.token_ids) for row in rows) for rows in script(1)]


def test_who_allows_it_gets_the_logits_as_they_were_computed() -> None:
    for cap, dtype in ((None, torch.bfloat16), (30.0, torch.float32)):
        runner = runner_of(replace(LLAMA, logit_cap=cap))
        wanted, got = (runner.forward(replace(Batch.of(script(1)[2]), as_computed=each)) for each in (False, True))
        assert (wanted.dtype, got.dtype) == (torch.float32, dtype)
        assert torch.equal(got.float(), wanted)


@pytest.mark.skipif(not multiplies_pairs() or has_matrix_unit(), reason="weights are packed, or torch's")
def test_in_the_last_layer_of_a_prompt_only_wanted_tokens_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[list[tuple[int, int]]] = []
    run = crew.Crew.run

    def watched(self: crew.Crew, lines: Int64s, *given: object) -> None:
        kinds = (pieces.TILES, pieces.PAIRS)
        products.append([(int(line[1]), int(line[6])) for line in lines if line[0] in kinds and line[3] in weights])
        run(self, lines, *given)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(crew.Crew, "run", watched)
    runner = runner_of(LLAMA)
    qkv = runner._model._layers[-1].attention.qkv.weight.tensor  # type: ignore[attr-defined]  # whose lines to look at
    q_width, whole = LLAMA.num_heads * LLAMA.head_dim, len(qkv)
    weights = {qkv.data_ptr(), qkv[q_width:].data_ptr()}
    ids = np.arange(40, dtype=np.int32)
    runner.forward([Row(ids, 0, [0, 1, 2], 0)])
    runner.forward([Row(ids, 0, [0, 1, 2], 1)])
    runner.forward([Row(ids, 0, [0, 1, 2], 20)])
    runner.forward([Row(ids[:1], 40, [0, 1, page], 1) for page in (2, 3)])
    keys_values = (0, whole - q_width)
    assert products == [[keys_values], [keys_values, (1, q_width)], [(0, whole)], [(0, whole)]]


def forest(seed: int) -> list[list[Row]]:
    """Seven prompts in one step, a turn behind each, then eight branches of each that decode: seven behind the turn."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> Int32s:
        return draw.integers(0, 200, count).astype(np.int32)

    prompts = [list(range(8 * i, 8 * i + 8)) for i in range(7)]
    turns = [[*prompt, *range(56 + 12 * i, 68 + 12 * i)] for i, prompt in enumerate(prompts)]
    branches = [
        Row(ids(1), 320 if j < 7 else 128, [*(turns[i] if j < 7 else prompts[i]), 140 + 8 * i + j])
        for i in range(7)
        for j in range(8)
    ]
    return [
        [Row(ids(128), 0, prompt) for prompt in prompts],
        [Row(ids(192), 128, turn, i % 2) for i, turn in enumerate(turns)],
        branches,
        [*branches, Row(ids(300), 0, list(range(200, 219)))],
    ]


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_large_steps_are_one_call_where_products_of_many_rows_have_a_kernel(
    config: ModelConfig, steps: list[int]
) -> None:
    at_once, apart = runner_of(config), kernel_by_kernel(config)
    for rows in forest(9):
        torch.testing.assert_close(at_once.forward(rows), apart.forward(rows), atol=0.06, rtol=0.05)
    counts = [sum(len(row.token_ids) for row in rows) for rows in forest(9)]
    has_any_size = multiplies_pairs() or has_matrix_unit()
    assert steps == [count for count in counts if has_any_size or count <= stack.MAX_TOKENS]
    torch.set_num_threads(1)
    alone = runner_of(config)
    for rows in forest(9):
        got, wanted = alone.forward(rows), at_once.forward(rows)
        if has_any_size:
            assert torch.equal(got, wanted)


def dense(seed: int) -> list[list[Row]]:
    """Rows of so many queries that they are read in several stacks: behind one prefix, and of one text. Every number of
    tokens is odd, and some rows want many logits."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> Int32s:
        return draw.integers(0, 200, count).astype(np.int32)

    prefix = list(range(8))
    return [
        [Row(ids(128), 0, prefix)],
        [Row(ids(71 + i), 128, [*prefix, *range(8 + 6 * i, 14 + 6 * i)], 30 if i % 3 else 1) for i in range(12)],
        [
            Row(ids(491), 0, list(range(100, 131)), 3),
            Row(ids(1), 128, [*prefix, 140]),
            Row(ids(77), 0, [*range(150, 155)]),
        ],
    ]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_rows_of_many_queries_are_read_in_stacks(
    config: ModelConfig, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one row, or of all that share a prefix."""
    costs = Costs(1.0, 0.0, key=1.0 if shares else 0.0, query=0.0 if shares else 1.0, segment=0.0)
    monkeypatch.setattr(forward, "costs_for", lambda *shape: costs)
    at_once, apart = runner_of(config), kernel_by_kernel(config)
    torch.set_num_threads(1)
    alone = runner_of(config)
    for rows in dense(4):
        torch.set_num_threads(3)
        got = at_once.forward(rows)
        torch.testing.assert_close(got, apart.forward(rows), atol=0.06, rtol=0.05)
        torch.set_num_threads(1)
        if multiplies_pairs() or has_matrix_unit():
            assert torch.equal(alone.forward(rows), got)


def test_nobody_who_helps_changes_a_bit(steps: list[int]) -> None:
    answers = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        runner = runner_of(LLAMA)
        # One thread leaves products of many rows to torch.
        answers.append([runner.forward(rows) for rows in script(2) if sum(len(row.token_ids) for row in rows) <= 64])
    assert all(torch.equal(one, other) for more in answers[1:] for one, other in zip(answers[0], more, strict=True))
    assert len(steps) == 3 * len(answers[0])


def test_weights_of_the_matrix_unit_are_read_too(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Elsewhere by the vectors that stand for it."""
    monkeypatch.setattr("niwaki.kernels.packed.has_matrix_unit", lambda: True)
    at_once, apart = runner_of(LLAMA), kernel_by_kernel(LLAMA)
    for rows in script(3):
        torch.testing.assert_close(at_once.forward(rows), apart.forward(rows), atol=0.06, rtol=0.05)
    assert steps


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_weights_of_few_bits_are_read_too(kind: str, steps: list[int]) -> None:
    config = replace(LLAMA, qkv_bias=True)
    at_once = Runner.random(config, weights=kind, num_pages=PAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "of", lambda *given: None)
        apart = Runner.random(config, weights=kind, num_pages=PAGES)
    for rows in script(3):
        torch.testing.assert_close(at_once.forward(rows), apart.forward(rows), atol=0.06, rtol=0.05)
    assert steps == [sum(len(row.token_ids) for row in rows) for rows in script(3)]


def test_steps_before_the_position_where_queries_grow_are_one_call(steps: list[int]) -> None:
    growing = replace(LLAMA, temperature=Temperature(3.0, 128, 0.0, is_everywhere=True))
    at_once, apart, other = runner_of(growing), kernel_by_kernel(growing), kernel_by_kernel(LLAMA)
    for number, rows in enumerate(script(8)):
        got, wanted = at_once.forward(rows), apart.forward(rows)
        torch.testing.assert_close(got, wanted, atol=0.06, rtol=0.05)
        grows = max(row.end for row in rows) > 128
        if len(got):
            assert (got - other.forward(rows)).abs().max() > 0.1 or not grows, number
        else:
            other.forward(rows)
    assert steps == [
        sum(len(row.token_ids) for row in rows) for rows in script(8) if max(row.end for row in rows) <= 128
    ]


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_other_models_go_from_kernel_to_kernel(config: ModelConfig, steps: list[int]) -> None:
    runner, apart = runner_of(config), kernel_by_kernel(config)
    for rows in script(4)[:4]:
        torch.testing.assert_close(runner.forward(rows), apart.forward(rows))
    assert not steps


def test_many_steps_with_helpers_that_come_when_they_like() -> None:
    """They are told of each step and may read of one that has long ended, and of the next."""
    runner, apart = runner_of(LLAMA), kernel_by_kernel(LLAMA)
    for each in (runner, apart):
        each.forward(script(5)[0])
    rows = [script(5)[number] for number in (4, 3, 2)]
    wanted = [apart.forward(each) for each in rows]
    first = [runner.forward(each) for each in rows]
    for got, right in zip(first, wanted, strict=True):
        torch.testing.assert_close(got, right, atol=0.06, rtol=0.05)
    for step in range(300):
        assert torch.equal(runner.forward(rows[step % 3]), first[step % 3]), step


def test_helpers_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(crew.Helper, "tell", lambda self, block, step: told.append(step))
    runner = runner_of(replace(LLAMA, num_layers=1))
    first = runner.forward(script(6)[0])
    rows = script(6)[2]
    once = runner.forward(rows)
    for _ in range(50):
        got = runner.forward(rows)
    assert torch.equal(got, once)
    assert not len(first)
    assert len(told) == 2 * 52


@pytest.mark.parametrize("what", ["os.eventfd", "threading.Thread.start"])
def test_a_system_that_gives_no_more_threads_harms_no_step(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refused(*given: object) -> None:
        raise OSError(24, "too many open files") if what == "os.eventfd" else RuntimeError("can't start new thread")

    runner = runner_of(LLAMA)
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(f"niwaki.kernels.crew.{what}", refused)
        alone = runner.forward(script(7)[2])
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert torch.equal(runner.forward(script(7)[2]), alone)


def test_a_process_that_was_forked_off_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(LLAMA)
    monkeypatch.setattr("niwaki.kernels.crew.os.getpid", lambda: -1)
    monkeypatch.setattr(crew, "Helper", lambda *given: pytest.fail("its threads stayed behind"))
    assert runner.forward(script(7)[2]).isfinite().all()


def test_a_position_beyond_the_model_is_refused_and_nothing_is_stored() -> None:
    runner = runner_of(replace(LLAMA, context_length=64))
    before = runner.read_pages(range(5)).copy()
    with pytest.raises(ValueError, match="position 69 is beyond the 64 positions of the model"):
        runner.forward([Row(np.arange(70, dtype=np.int32), 0, list(range(5)))])
    assert np.array_equal(runner.read_pages(range(5)), before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one core")
def test_helpers_leave_the_core_where_the_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(crew, "current_core", lambda: core)
    before = threading.enumerate()
    runner = runner_of(LLAMA)
    runner.forward(script(8)[4])
    helpers = [thread for thread in threading.enumerate() if thread not in before and thread.name == "niwaki-crew"]
    assert len(helpers) == 2
    for thread in helpers:
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) - {core}


def test_helpers_end_with_their_model() -> None:
    def helpers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "niwaki-crew"}

    of_others = helpers()
    runner = runner_of(LLAMA)
    runner.forward(script(8)[4])
    own = helpers() - of_others
    assert len(own) == 2
    del runner
    gc.collect()
    wait_until(lambda: not own & helpers())


def test_a_table_of_lines_is_written_anew_when_the_activations_have_moved() -> None:
    """Its addresses are used unchecked."""
    space, other = (Workspace(LLAMA, torch.device("cpu"), torch.bfloat16) for _ in range(2))
    small, large = space.of_size(4), space.of_size(16)
    assert small.memory == large.memory != other.of_size(4).memory
    space.of_size(100)
    assert space.of_size(4).memory != small.memory


def test_steps_that_grow_and_shrink_give_what_each_alone_gives() -> None:
    grown = Runner.random(LLAMA, num_pages=PAGES)
    for count in (3, 40, 3, 200, 40, 3):
        rows = [Row(np.arange(1, 1 + count, dtype=np.int32), 0, range(1 + count // grown.page_size), 1)]
        alone = Runner.random(LLAMA, num_pages=PAGES)
        assert torch.equal(grown.forward(rows), alone.forward(rows))
