"""`Engine(kv_dtype="int8")` and `"fp8"`: keys and values in 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from niwaki.radix.pages import PageCopy
from niwaki.runtime import bundled
from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Row, Runner

MODEL = Path(bundled.MODEL_DIR)
PROMPT = "Text: Lena Fischer is a nurse from Dresden.\nFields: name, role, city\nJSON:"
IDS = np.random.default_rng(0).integers(5, 2000, 90).astype(np.int32)


def runner(kv_dtype: str = "int8", dtype: str = "bfloat16") -> Runner:
    return Runner.load(MODEL, dtype=dtype, kv_dtype=kv_dtype, num_pages=16)


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).square().mean().sqrt())


def test_logits_are_nearly_those_of_a_bfloat16_cache() -> None:
    exact, *others = (
        made.forward([Row(IDS, 0, range(6), len(IDS))])
        for made in (runner("auto", "float32"), runner("auto"), runner("int8"), runner("fp8"))
    )
    plain, whole, float8 = (error_of(logits, exact) for logits in others)
    assert plain < whole < 2.5 * plain
    assert whole < float8 < 8 * plain, "of 8 bits the exponent takes four"


both_kinds = pytest.mark.parametrize("kind", ["int8", "fp8"])


@both_kinds
def test_chunks_and_single_tokens_continue_what_is_stored(kind: str) -> None:
    """Rounded sums fall to one code or the next, so what comes in chunks differs from the whole: over several texts by
    less than both from exact keys."""
    made, exact = runner(kind), runner("auto", "float32")
    steps = [(0, 50), (50, 85), *((at, at + 1) for at in range(85, 90))]
    apart, lost = 0.0, 0.0
    for seed in range(6):
        ids = np.random.default_rng(seed).integers(5, 2000, 90).astype(np.int32)
        (whole,) = made.forward([Row(ids, 0, range(6), 1)])
        (right,) = exact.forward([Row(ids, 0, range(6), 1)])
        for first, last in steps:
            (logits,) = made.forward([Row(ids[first:last], first, range(6, 12), 1)])
        apart += error_of(logits, whole)
        lost += error_of(whole, right)
    assert apart < lost


@both_kinds
def test_copied_and_moved_pages_keep_their_scales(kind: str) -> None:
    made = runner(kind)
    made.forward([Row(IDS[:40], 0, range(3), 1)])
    made.copy_pages([PageCopy(2, 5, 8)])
    moved = made.read_pages([0, 1])
    assert moved.shape == (2, 16 * made.kv_bytes_per_token)
    made.write_pages([8, 9], moved)
    following = [made.forward([Row(IDS[40:41], 40, pages, 1)]) for pages in ([0, 1, 2], [8, 9, 5])]
    assert torch.equal(*following)


def test_a_token_takes_little_more_than_half_the_bytes() -> None:
    assert runner().kv_bytes_per_token == runner("auto").kv_bytes_per_token * (64 + 4) // 128
    with Engine(dtype="bfloat16", kv_memory=2**24) as plain, Engine(kv_dtype="int8", kv_memory=2**24) as small:
        assert small.get_server_info()["kv_tokens"] > 1.85 * plain.get_server_info()["kv_tokens"]  # type: ignore[operator]  # ints


@both_kinds
def test_a_saved_cache_is_for_engines_of_its_kind(kind: str, tmp_path: Path) -> None:
    def engine(kv_dtype: str) -> Engine:
        return Engine(dtype="bfloat16", kv_dtype=kv_dtype, kv_tokens=512)

    def answer(of: Engine) -> object:
        result = of.generate(PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 24, "stop": "\n"})
        assert isinstance(result, dict)
        return result["text"]

    with engine(kind) as made:
        said = answer(made)
        assert said == ' {"name":"Lena Fischer","role":"nurse","city":"Dresden"}'
        saved = made.save_cache(tmp_path / "cache")
    with engine(kind) as warm:
        assert warm.load_cache(tmp_path / "cache") == saved > 0
        assert answer(warm) == said
    for another in {"auto", "int8", "fp8"} - {kind}:
        with engine(another) as other, pytest.raises(ConfigError, match="by an engine of another model, dtype"):
            other.load_cache(tmp_path / "cache")


@both_kinds
def test_it_wants_bfloat16(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype='{kind}' wants dtype='bfloat16', got float32"):
        Engine(kv_dtype=kind, dtype="float32", kv_tokens=512)
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, int8, fp8, got 'int4'"):
        Engine(kv_dtype="int4")
