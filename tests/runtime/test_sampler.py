"""Sampling: the distribution is the reference's, a row never feels its mates, a fault stays in its row."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec import structs

from niwaki.kernels.sample import uniform
from niwaki.runtime.api import GenerationError, SamplingParams
from niwaki.runtime.api.likeliest import NOTHING
from niwaki.runtime.sampling.sampler import Sampled, SampleRow, sample, token_logprobs

GREEDY = SamplingParams(temperature=0.0)
VOCABS = (1, 31, 33, 512, 700, 2048)


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def mask_of(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    padded = np.zeros((len(allowed) + 31) // 32 * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def tokens_of(results: list[Sampled | GenerationError]) -> list[int]:
    assert all(isinstance(result, Sampled) for result in results), results
    return [result.token_id for result in results if isinstance(result, Sampled)]


def reference(
    logits: npt.NDArray[np.float64], params: SamplingParams, allowed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """The probabilities after every step, by sorting everything in float64."""
    scaled = np.where(allowed, logits, -np.inf) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum(), np.float64)


def chi_square_fits(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> bool:
    """Whether the counts could be of these probabilities (4.5 sigma by Wilson and Hilferty's approximation)."""
    assert counts[probs == 0].sum() == 0, "a token that cannot be drawn was drawn"
    total = counts.sum()
    common = probs * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probs[common], probs[~common].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(observed) - 1
    if degrees == 0:
        return True
    statistic = ((observed - expected) ** 2 / expected).sum()
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return bool(abs(z) < 4.5)


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7, temperature=1.5),
    SamplingParams(top_k=5000),
    SamplingParams(top_p=0.5, temperature=2.0),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1, temperature=2.0),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=30, top_p=0.8, min_p=0.05, temperature=1.7),
    SamplingParams(top_p=0.9, min_p=0.2, temperature=2.5),
]


@pytest.mark.parametrize("vocab", [40, 1100])
@pytest.mark.parametrize("params", CASES, ids=lambda p: f"t{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p}")
@pytest.mark.parametrize("masked", ["all", "most", "few"])
def test_what_is_drawn_follows_the_reference_distribution(params: SamplingParams, vocab: int, masked: str) -> None:
    logits = logits_of(1, vocab, seed=vocab, spread=2.0)
    share = {"all": 1.0, "most": 0.8, "few": 0.2}[masked]
    allowed = np.random.default_rng(1).random(vocab) < share
    allowed[3] = True
    mask = None if masked == "all" else mask_of(allowed)
    draws = 1200
    rows = [SampleRow(params, 11, position, mask) for position in range(draws)]
    drawn = tokens_of(sample(logits.expand(draws, vocab), rows))
    counts = np.bincount(drawn, minlength=vocab)
    assert chi_square_fits(counts, reference(logits[0].numpy().astype(np.float64), params, allowed))


def test_the_chi_square_test_itself_sees_a_wrong_distribution() -> None:
    rng = np.random.default_rng(0)
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    assert chi_square_fits(rng.multinomial(4000, probs), probs)
    assert not chi_square_fits(rng.multinomial(4000, [0.15, 0.2, 0.3, 0.35]), probs)


def test_equal_logits_are_cut_by_token_id_so_that_exactly_k_are_left() -> None:
    logits = torch.zeros(400, 50)
    rows = [SampleRow(SamplingParams(top_k=3), 1, position) for position in range(400)]
    assert set(tokens_of(sample(logits, rows))) == {0, 1, 2}
    rows = [SampleRow(SamplingParams(top_p=0.05), 1, position) for position in range(400)]
    assert set(tokens_of(sample(logits, rows))) == {0, 1, 2}  # 2.5 tokens' worth


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_first_of_the_highest(vocab: int) -> None:
    logits = logits_of(20, vocab).round()
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits.numpy()]
    assert tokens_of(sample(logits, [SampleRow(GREEDY, 0, 0)] * 20)) == expected
    everything = mask_of(np.ones(vocab, np.bool_))
    assert tokens_of(sample(logits, [SampleRow(GREEDY, 0, 0, everything)] * 20)) == expected


def random_row(rng: random.Random, vocab: int, index: int) -> SampleRow:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([-1, -1, 1, 5, 10_000]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.2]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, -0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([(), ((0, 2.5),)]),
        return_logprob=rng.random() < 0.5,
        top_logprobs_num=rng.choice([0, 3]),
    )
    share = rng.choice([0.01, 0.3, 0.9])
    allowed = np.array([rng.random() < share for _ in range(vocab)])
    allowed[rng.randrange(vocab)] = True
    return SampleRow(
        params=params,
        seed=index * 7919,
        position=rng.randrange(100),
        mask=rng.choice([None, mask_of(allowed)]),
        prompt_ids=[rng.randrange(vocab) for _ in range(9)],
        output_ids=np.array([rng.randrange(vocab) for _ in range(5)]),
        forbid=() if vocab == 1 else rng.choice([(), (rng.randrange(vocab),)]),
    )


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_is_bit_equal_alone_and_among_any_mates(vocab: int) -> None:
    rng = random.Random(vocab)
    logits = logits_of(40, vocab, seed=1)
    logits[5, 0] = float("nan")
    logits[11] = -float("inf")
    rows = [random_row(rng, vocab, index) for index in range(40)]
    alone = [repr(sample(logits[i : i + 1], [rows[i]])) for i in range(40)]
    for _ in range(12):
        picked = rng.sample(range(40), rng.randint(1, 40))
        together = sample(logits[picked], [rows[i] for i in picked])
        assert [repr([result]) for result in together] == [alone[i] for i in picked]


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(8, 700)
    before = logits.clone()
    rng = random.Random(0)
    sample(logits, [random_row(rng, 700, index) for index in range(8)])
    assert torch.equal(logits, before)


def test_logits_that_are_a_strided_view_give_the_same_tokens() -> None:
    wide = logits_of(6, 900)
    rows = [SampleRow(SamplingParams(), 3, position) for position in range(3)]
    assert sample(wide[::2, 100:800], rows) == sample(wide[::2, 100:800].contiguous(), rows)


@pytest.mark.parametrize(
    "params", [SamplingParams(), GREEDY, SamplingParams(top_k=3), SamplingParams(return_logprob=True)]
)
def test_a_fault_belongs_to_its_row(params: SamplingParams) -> None:
    logits = logits_of(7, 100)
    rows = [SampleRow(params, 1, position) for position in range(7)]
    clean = sample(logits, rows)
    broken = logits.clone()
    broken[1, 50] = float("nan")
    broken[2] = -float("inf")
    broken[3, 99] = float("inf")
    rows[4] = structs.replace(rows[4], mask=np.zeros(4, np.uint32))
    rows[5] = structs.replace(rows[5], mask=np.zeros(3, np.uint32))
    results = sample(broken, rows)
    assert [results[0], results[6]] == [clean[0], clean[6]]
    for index, message in {1: "nan", 2: "-inf", 3: "inf", 4: "no token is allowed", 5: "does not fit"}.items():
        error = results[index]
        assert isinstance(error, GenerationError)
        assert message in str(error)


def test_a_nan_behind_the_mask_is_still_a_fault() -> None:
    logits = logits_of(1, 64)
    logits[0, 40] = float("nan")
    mask = np.array([0xFFFFFFFF, 0], np.uint32)
    assert isinstance(sample(logits, [SampleRow(SamplingParams(), 1, 0, mask)])[0], GenerationError)


def test_forbidding_every_allowed_token_is_an_error_and_bias_of_minus_100_on_all_is_not() -> None:
    logits = logits_of(2, 8)
    rows = [
        SampleRow(SamplingParams(), 1, 0, mask_of(np.arange(8) == 3), forbid=(3,)),
        SampleRow(SamplingParams(logit_bias=tuple((t, -100.0) for t in range(8))), 1, 0),
    ]
    empty, shifted = sample(logits, rows)
    assert isinstance(empty, GenerationError)
    assert isinstance(shifted, Sampled)


def test_a_bias_outside_the_vocabulary_is_an_error_of_its_row() -> None:
    results = sample(
        logits_of(2, 8), [SampleRow(SamplingParams(logit_bias=((8, 1.0),)), 1, 0), SampleRow(GREEDY, 1, 0)]
    )
    assert isinstance(results[0], GenerationError)
    assert "token 8; the vocabulary has 8" in str(results[0])
    assert isinstance(results[1], Sampled)


def test_mask_bits_beyond_the_vocabulary_are_ignored() -> None:
    for share in (0.1, 1.0):
        allowed = np.arange(64) >= 40 if share < 1 else np.ones(64, np.bool_)
        rows = [SampleRow(SamplingParams(temperature=5.0), 2, position, mask_of(allowed)) for position in range(300)]
        tokens = tokens_of(sample(logits_of(1, 50).expand(300, 50), rows))
        assert max(tokens) < 50


def test_penalties_bias_and_forbidden_tokens_change_the_logits_by_their_formulas() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
    prompt, output = [1, 2], [0, 0, 2]

    def logprobs_after(params: SamplingParams, forbid: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
        draws = 3000
        row = SampleRow(params, 5, 0, None, prompt, output, forbid)
        drawn = sample(logits.expand(draws, 4), [structs.replace(row, position=p) for p in range(draws)])
        return np.bincount(tokens_of(drawn), minlength=4) / draws

    def softmax(values: list[float]) -> npt.NDArray[np.float64]:
        return np.asarray(np.exp(values) / np.exp(values).sum(), np.float64)

    cases: list[tuple[SamplingParams, list[float]]] = [
        (SamplingParams(repetition_penalty=2.0), [1.0, 0.5, -2.0, 0.5]),
        (SamplingParams(frequency_penalty=0.5), [1.0, 1.0, -1.5, 0.5]),
        (SamplingParams(presence_penalty=1.0), [1.0, 1.0, -2.0, 0.5]),
        (SamplingParams(frequency_penalty=-0.5, presence_penalty=0.5), [2.5, 1.0, -1.0, 0.5]),
        (SamplingParams(logit_bias=((1, -2.0), (3, 1.0))), [2.0, -1.0, -1.0, 1.5]),
        (SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((0, 1.0),)), [0.0, 0.5, -3.0, 0.5]),
    ]
    for params, expected in cases:
        assert np.abs(logprobs_after(params) - softmax(expected)).max() < 0.04, params
    assert np.abs(logprobs_after(SamplingParams(), (0, 3, 99)) - softmax([-1e9, 1.0, -1.0, -1e9])).max() < 0.04


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_are_the_models_own_whatever_the_sampling_does(vocab: int) -> None:
    logits = logits_of(5, vocab)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    params = SamplingParams(temperature=0.2, top_k=2, return_logprob=True, top_logprobs_num=20, repetition_penalty=1.5)
    mask = mask_of(np.arange(vocab) >= vocab // 2)
    rows = [SampleRow(params, 1, position, mask, [0], [0]) for position in range(5)]
    for result, wanted in zip(sample(logits, rows), expected, strict=True):
        assert isinstance(result, Sampled)
        assert result.token_id >= vocab // 2
        assert result.logprob == pytest.approx(wanted[result.token_id], abs=2e-6, rel=2e-6)
        best = np.argsort(-wanted, kind="stable")[:20]
        assert result.top.unpacked()[0] == best.tolist()
        assert result.top.unpacked()[1] == pytest.approx(wanted[best].tolist(), abs=2e-6, rel=2e-6)


def test_logprobs_are_left_out_where_nobody_asks() -> None:
    result = sample(logits_of(1, 10), [SampleRow(SamplingParams(), 0, 0)])[0]
    assert isinstance(result, Sampled)
    assert result.logprob is None
    assert result.top == NOTHING


def test_prompt_logprobs_are_those_of_log_softmax() -> None:
    logits = logits_of(6, 300)
    targets = [5, 299, 0, 7, 7, 100]
    expected = torch.log_softmax(logits.double(), -1)
    read = token_logprobs(logits, torch.tensor(targets).numpy(), 2)
    for row, entry in enumerate(read):
        assert isinstance(entry, Sampled)
        assert entry.token_id == targets[row]
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-5)
        assert entry.top.unpacked()[0] == torch.topk(logits[row], 2).indices.tolist()
    logits[2, 0] = float("nan")
    beside = token_logprobs(logits, targets, 2)
    assert isinstance(beside[2], GenerationError)
    assert "nan" in str(beside[2])
    assert [*beside[:2], *beside[3:]] == [*read[:2], *read[3:]], "the others are told as without it"


def test_extreme_logits_and_temperatures_stay_in_bounds() -> None:
    logits = torch.tensor([[1e38, -1e38, 0.0], [3e38, 3e38, -3e38], [-1e30, -2e30, -float("inf")], [80.0, -80.0, 79.0]])
    for temperature in (1e-5, 1.0, 100.0):
        for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
            rows = [SampleRow(replace(params, return_logprob=True), 1, position) for position in range(4)]
            results = sample(logits, rows)
            tokens = tokens_of(results)
            assert tokens[0] == 0
            assert tokens[1] in (0, 1)
            assert tokens[2] == 0
            assert all(isinstance(r, Sampled) and r.logprob is not None and r.logprob <= 1e-6 for r in results)


def test_random_numbers_are_even_and_depend_on_seed_and_position() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(100)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    assert chi_square_fits(np.histogram(numbers, bins=50, range=(0, 1))[0], np.full(50, 0.02))
    for lag in (numbers[1:].ravel() - numbers[:-1].ravel(), numbers[:, 1:].ravel() - numbers[:, :-1].ravel()):
        assert abs(np.mean(np.abs(lag)) - 1 / 3) < 0.01  # neighbours are as far apart as strangers
    assert uniform(2**63 - 1, 10**6) == uniform(2**63 - 1, 10**6)


def test_no_rows_are_no_tokens_and_a_wrong_shape_is_our_bug() -> None:
    assert sample(torch.empty(0, 10), []) == []
    with pytest.raises(ValueError, match=r"float32 \[1, vocab\]"):
        sample(torch.zeros(2, 10), [SampleRow(GREEDY, 0, 0)])
    with pytest.raises(ValueError, match="float64"):
        sample(torch.zeros(1, 10, dtype=torch.float64), [SampleRow(GREEDY, 0, 0)])
