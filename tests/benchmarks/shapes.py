"""The models of the benchmarks: the bundled one, and Llamas of random weights named by millions of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from niwaki.runtime import bundled
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.models.config import ModelConfig
from tests.toy import make_model

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
L300 = ModelConfig(
    vocab_size=131_072,
    num_layers=15,
    hidden_size=1024,
    intermediate_size=2816,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    context_length=4096,
    tie_embeddings=True,
    dtype="bfloat16",
)
L3000 = ModelConfig(  # that of Llama 3.2 3B
    vocab_size=128_256,
    num_layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    context_length=4096,
    tie_embeddings=True,
    dtype="bfloat16",
)

SHAPES: Mapping[str, ModelConfig] = {
    "niwaki-tiny": read_model_folder(Path(bundled.MODEL_DIR)).config,
    "L15": L15,
    "L60": L60,
}
RANDOM: Mapping[str, ModelConfig] = {"L15": L15, "L60": L60, "L300": L300}
LARGE: Mapping[str, ModelConfig] = {"L3000": L3000}  # 6.4 GB on disk, twice that in memory while it is made and loaded


def model_folder(name: str) -> Path:
    """A folder with such a model, made once: random weights, a toy tokenizer of 400 tokens."""
    if name == "niwaki-tiny":
        return Path(bundled.MODEL_DIR)
    folder, config = Path("build/models", name), {**RANDOM, **LARGE}[name]
    if not (folder / "model.safetensors").exists():
        make_model(
            folder,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            tie_word_embeddings=config.tie_embeddings,
            torch_dtype=config.dtype,
        )
    return folder
