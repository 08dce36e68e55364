"""`Engine(weights=...)`: a bfloat16 folder whose products keep their weights in few bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from niwaki.runtime import bundled
from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.options.config import EngineConfig

PROMPT = (
    "<|bos|><|system|>You extract facts as JSON.<|end|><|user|>Lena Fischer is a nurse from Dresden."
    "\n\nFields: name, role, city<|end|><|assistant|>"
)
MODEL = Path(bundled.MODEL_DIR)
KINDS = ("auto", "int8", "fp8", "int4")
ROW = Row(np.arange(3, 40, dtype=np.int32), 0, [0, 1, 2], 37)


def logits(weights: str, dtype: str) -> torch.Tensor:
    return Runner.load(MODEL, dtype=dtype, weights=weights, num_pages=3).forward([ROW])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fewer_bits_are_further_from_the_models_own_logits(dtype: str) -> None:
    exact = logits("auto", "float32")
    errors = [float((logits(kind, dtype) - exact).square().mean().sqrt()) for kind in KINDS]
    assert errors == sorted(errors)
    assert errors[-1] < 0.5 * float(exact.std())


@pytest.mark.parametrize("weights", KINDS[1:])
def test_the_bundled_model_answers_with_its_weights_in_few_bits(weights: str) -> None:
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(PROMPT, add_special_tokens=False).ids
    with Engine(weights=weights, kv_tokens=512) as engine:
        result = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 60})
    assert isinstance(result, dict)
    assert result["text"] == '{"name":"Lena Fischer","role":"nurse","city":"Dresden"}'


def test_a_saved_cache_of_other_weights_is_refused(tmp_path: Path) -> None:
    with Engine(kv_tokens=512) as engine:
        engine.save_cache(tmp_path / "cache")
    with (
        Engine(weights="int8", kv_tokens=512) as engine,
        pytest.raises(ConfigError, match="by an engine of another model, dtype"),
    ):
        engine.load_cache(tmp_path / "cache")


def test_an_unknown_way_to_keep_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights must be one of auto, int8, int4, fp8, got 'int3'"):
        EngineConfig(weights="int3")
