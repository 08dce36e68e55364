"""Small models on disk for tests: a toy tokenizer and random weights of a real architecture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 400


def make_tokenizer(folder: Path, *, template: str | None = TEMPLATE, texts: Sequence[str] = ()) -> Path:
    """A byte-level BPE of 400 tokens with chat markers, trained on `texts` as well; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = [
        "the cat sat on the mat and the dog sat on the log",
        "naïve café, 東京 and Zürich",
        "a b c 1 2 3 yes no maybe",
    ]
    built.train_from_iterator([*text, *texts] * 20, trainer)
    built.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", built.token_to_id("<|bos|>"))]
    )
    built.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": "<|bos|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_model(
    folder: Path, *, seed: int = 0, sharpness: float = 1.0, texts: Sequence[str] = (), **changes: object
) -> Path:
    """A random Llama of two layers with the toy tokenizer (trained on `texts` as well), as a Hugging Face
    folder. `changes` are fields of its config.json.

    `sharpness` scales the logits: above 1 the model is surer of itself, so that greedy text is no matter of rounding.
    """
    make_tokenizer(folder, texts=texts)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    generator = torch.Generator().manual_seed(seed)

    dtype = getattr(torch, str(config["torch_dtype"]))

    def draw(*shape: int, times: float = 1) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * (1 / math.sqrt(shape[-1])) * times).to(dtype)

    hidden, inner, vocab, head_dim = (
        int(str(config[name])) for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    query, value = (int(str(config[name])) * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator).to(dtype),
        "lm_head.weight": draw(vocab, hidden, times=sharpness),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(int(str(config["num_hidden_layers"]))):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": draw(query, hidden, times=2),
            f"{name}.self_attn.k_proj.weight": draw(value, hidden, times=2),
            f"{name}.self_attn.v_proj.weight": draw(value, hidden),
            f"{name}.self_attn.o_proj.weight": draw(hidden, query),
            f"{name}.mlp.gate_proj.weight": draw(inner, hidden),
            f"{name}.mlp.up_proj.weight": draw(inner, hidden),
            f"{name}.mlp.down_proj.weight": draw(hidden, inner),
            f"{name}.input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
        }
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
