"""The model shapes of the benchmarks: the bundled one, and Llamas of random weights named by millions of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from niwaki.runtime import bundled
from niwaki.runtime.loader import read_model_folder
from niwaki.runtime.models.config import ModelConfig

L15 = ModelConfig(
    vocab_size=8192,
    num_layers=6,
    hidden_size=384,
    intermediate_size=960,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    context_length=4096,
    dtype="bfloat16",
)
L60 = ModelConfig(
    vocab_size=32_768,
    num_layers=14,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    context_length=4096,
    tie_embeddings=True,
    dtype="bfloat16",
)

SHAPES: Mapping[str, ModelConfig] = {
    "niwaki-tiny": read_model_folder(Path(bundled.MODEL_DIR)).config,
    "L15": L15,
    "L60": L60,
}
