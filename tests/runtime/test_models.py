"""The model against transformers: the same logits, however the tokens are cut, cached and batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from niwaki.radix.pages import PageCopy
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import ModelConfig
from tests.families import LLAMA3
from tests.reference import Ids, Pair, Sequenced, difference, open_reference, run

VOCAB = 300
NUM_PAGES = 400
SHAPES: dict[str, dict[str, object]] = {
    "grouped-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "multi-head-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "multi-query-biased": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "wide-heads": {"num_key_value_heads": 2, "head_dim": 32, "hidden_size": 48, "rms_norm_eps": 1e-5},
    "linear-rope": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    },
}


def make_pair(folder: Path, shape: dict[str, object], dtype: torch.dtype = torch.float32) -> Pair:
    torch.manual_seed(0)
    options: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,  # wide enough that attention prefers some keys, so a wrong key shows
    }
    model = LlamaForCausalLM(LlamaConfig(**{**options, **shape})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if dtype == torch.float32:
        model.save_pretrained(folder, max_shard_size="300KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return Pair(model, folder)
    model.to(dtype).save_pretrained(folder)
    return Pair(open_reference(folder, dtype), folder)


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("model"), SHAPES[request.param])


def load(pair: Pair, dtype: str = "auto", page_size: int = 16) -> Runner:
    return Runner.load(pair.folder, dtype=dtype, num_pages=NUM_PAGES, page_size=page_size)


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, VOCAB, count).astype(np.int32)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 200])
def test_a_whole_prompt_gives_the_logits_of_transformers(pair: Pair, length: int) -> None:
    ids = random_ids(np.random.default_rng(length), length)
    got = load(pair).forward([Row(ids, 0, range(NUM_PAGES), length)])
    assert (got - pair.logits(ids)).abs().max() < 1e-4


def long_and_cached(runner: Runner, ids: Ids, rng: np.random.Generator) -> list[Sequenced]:
    """2,000 tokens cold, and the same behind 1,903 cached ones of another request (118 pages and a part of one)."""
    assert len(ids) == 2000
    pages = [int(page) for page in rng.permutation(NUM_PAGES)[:257]]
    first, cold, tail = pages[:125], pages[125:250], pages[250:]
    runner.forward([Row(ids, 0, first, 0)])
    runner.copy_pages([PageCopy(first[118], tail[0], 15)])
    return [Sequenced(ids, cold), Sequenced(ids, [*first[:118], *tail], done=1903)]


def test_2000_tokens_give_the_same_logits_whole_in_chunks_cached_and_among_others(pair: Pair) -> None:
    rng = np.random.default_rng(2)
    ids = random_ids(rng, 2000)
    expected = pair.logits(ids)
    runner = load(pair)
    assert (runner.forward([Row(ids, 0, range(125), 2000)]) - expected).abs().max() < 1e-4
    sequences = long_and_cached(runner, ids, rng)
    taken = {page for sequence in sequences for page in sequence.page_ids}
    free = [page for page in range(NUM_PAGES) if page not in taken]
    sequences += [Sequenced(ids[:1], free[:1]), Sequenced(ids[:333], free[1:22])]
    run(runner, sequences, rng, largest=700)
    for sequence in sequences:
        assert difference(sequence, expected[: len(sequence.ids)]) < 1e-4


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_ragged_batch_gives_each_request_the_logits_it_has_alone(pair: Pair, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    runner = load(pair, page_size=page_size)
    free = list(rng.permutation(NUM_PAGES))
    sequences = []
    for length in (1, 3, 16, 33, 50, 90):
        pages = [int(free.pop()) for _ in range(-(-length // page_size))]
        sequences.append(Sequenced(random_ids(rng, length), pages))
    run(runner, sequences, rng)
    for sequence in sequences:
        assert difference(sequence, pair.logits(sequence.ids)) < 1e-4


def test_a_cached_prefix_and_a_copied_partial_page_change_no_logits(pair: Pair) -> None:
    rng = np.random.default_rng(5)
    runner = load(pair)
    first = Sequenced(random_ids(rng, 60), [7, 3, 11, 5])
    run(runner, [first], rng)
    shared = 41  # two whole pages and 9 tokens of the third
    second = Sequenced(np.concatenate([first.ids[:shared], random_ids(rng, 30)]), [7, 3, 20, 21, 22], done=shared)
    runner.copy_pages([PageCopy(11, 20, shared % 16)])
    run(runner, [second], rng, largest=20)
    assert difference(second, pair.logits(second.ids)) < 1e-4
    again = runner.forward([Row(first.ids[-1:], len(first.ids) - 1, first.page_ids)])
    assert (again[0] - first.logits[-1][-1]).abs().max() < 1e-4, "the first request's pages were written"


def test_the_bundled_model_gives_the_logits_of_transformers() -> None:
    pair = Pair(open_reference(MODEL_DIR, torch.float32), MODEL_DIR)
    rng = np.random.default_rng(9)
    runner = load(pair, dtype="float32")
    sequences = [Sequenced(random_ids(rng, n), list(range(start, start + 20))) for start, n in ((0, 70), (20, 250))]
    run(runner, sequences, rng)
    for sequence in sequences:
        expected = pair.logits(sequence.ids)
        assert difference(sequence, expected) < 1e-4 * max(1.0, float(expected.abs().max()))


def test_only_the_positions_that_are_asked_for_get_logits(pair: Pair) -> None:
    rng = np.random.default_rng(6)
    runner = load(pair)
    long, short = random_ids(rng, 40), random_ids(rng, 5)
    got = runner.forward([Row(long, 0, [0, 1, 2], 0), Row(short, 0, [3], 2), Row(long, 0, [4, 5, 6], 1)])
    expected = torch.cat([pair.logits(short)[-2:], pair.logits(long)[-1:]])
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-4
    assert runner.forward([Row(short, 0, [7], 0)]).shape == (0, VOCAB)
    after = runner.forward([Row(short[:1], 5, [7]), Row(short[:1], 5, [3])])
    assert (after[0] - after[1]).abs().max() < 1e-5, "a chunk without logits must store its keys all the same"


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_logits_are_as_near_to_the_truth_as_those_of_transformers(shape: str, tmp_path: Path) -> None:
    """The truth: the same rounded weights, computed in float32."""
    pair = make_pair(tmp_path, SHAPES[shape], torch.bfloat16)
    rng = np.random.default_rng(7)
    runner = load(pair)
    assert runner.kv_bytes_per_token == runner.config.kv_bytes_per_token("bfloat16")
    ids = random_ids(rng, 2000)
    truth, theirs = pair.in_float32().logits(ids), pair.logits(ids)
    sequences = long_and_cached(runner, ids, rng)
    sequences.append(Sequenced(ids[:150], sorted(set(range(NUM_PAGES)) - {p for s in sequences for p in s.page_ids})))
    run(runner, sequences, rng, largest=700)
    for sequence in sequences:
        got = torch.cat(sequence.logits)
        place = slice(len(sequence.ids) - len(got), len(sequence.ids))
        error, their_error = got - truth[place], theirs[place] - truth[place]
        assert error.square().mean().sqrt() <= 1.2 * their_error.square().mean().sqrt()
        assert error.abs().max() <= 2 * their_error.abs().max()


def test_float32_asked_of_a_bfloat16_checkpoint_is_the_exact_truth(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, SHAPES["grouped-tied"], torch.bfloat16)
    ids = random_ids(np.random.default_rng(8), 50)
    got = load(pair, dtype="float32").forward([Row(ids, 0, range(10), 50)])
    assert (got - pair.in_float32().logits(ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(np.zeros(0, np.int32), 0, [0], 0), "at least one new token"),
        (Row(np.zeros(17, np.int32), 0, [0]), "needs 2 pages"),
        (Row(np.zeros(1, np.int32), 0, [NUM_PAGES]), "outside the pool"),
        (Row(np.zeros(1, np.int32), 0, [-1]), "outside the pool"),
        (Row(np.zeros(1, np.int32), 0, [0], 2), "num_logits"),
        (Row(np.zeros(1, np.int32), 4096, range(257)), "beyond the 4096 positions"),
    ],
)
def test_a_row_that_would_read_or_write_outside_its_pages_is_refused(row: Row, message: str, tmp_path: Path) -> None:
    runner = load(make_pair(tmp_path, SHAPES["grouped-tied"]))
    with pytest.raises(ValueError, match=message):
        runner.forward([row])


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    runner = load(make_pair(tmp_path, SHAPES["grouped-tied"]))
    for token in (-1, VOCAB):
        with pytest.raises(IndexError):
            runner.forward([Row(np.array([token], np.int32), 0, [0])])


def test_a_copy_outside_the_pool_is_refused(tmp_path: Path) -> None:
    runner = load(make_pair(tmp_path, SHAPES["grouped-tied"]))
    for copy in (PageCopy(0, NUM_PAGES, 1), PageCopy(-1, 0, 1), PageCopy(0, 1, 17)):
        with pytest.raises(ValueError, match="cannot copy"):
            runner.copy_pages([copy])


def test_an_empty_batch_is_no_work(tmp_path: Path) -> None:
    assert load(make_pair(tmp_path, SHAPES["grouped-tied"])).forward([]).shape == (0, VOCAB)


def test_random_weights_are_the_same_for_the_same_seed() -> None:
    config = ModelConfig(
        vocab_size=50,
        num_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        context_length=64,
    )
    runners = [Runner.random(config, seed=seed, num_pages=4) for seed in (1, 1, 2)]
    a, b, c = (runner.forward([Row(np.arange(5, dtype=np.int32), 0, [0])]) for runner in runners)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
