"""A small model of every family, with random weights: in a folder, and in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config, PreTrainedModel

from tests.reference import Pair, open_reference

VOCAB = 120
WINDOW = 9  # shorter than the prompts, and no multiple of a page
COMMON: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,  # wide enough that attention prefers some keys, so a wrong key shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MINISTRAL3_ROPE = {
    **YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [2.0, 3.0, 5.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 128,
}
GEMMA3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1_000.0},
    FULL: {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0},
}

# Architecture -> its configuration class in transformers, where that has another name.
CONFIG_CLASSES = {
    "Qwen2VLForConditionalGeneration": "Qwen2VLConfig",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
    "Llama4ForCausalLM": "Llama4TextConfig",
    "Llama4ForConditionalGeneration": "Llama4Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3: dict[str, object] = {
    "sliding_window": WINDOW,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "layer_types": [SLIDING, FULL, SLIDING],
    "rope_parameters": GEMMA3_ROPES,
}


def in_three(*channels: int) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(channels)}


LLAMA4: dict[str, object] = {
    "intermediate_size_mlp": 56,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "attention_chunk_size": 13,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "floor_scale": 7,
    "attn_scale": 0.6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LATENT: dict[str, object] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_key_value_heads": None,
}

GRANITE: dict[str, object] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.5,
}
GRANITE4: dict[str, object] = {
    **GRANITE,
    "shared_intermediate_size": 56,
    "num_local_experts": 0,
    "layer_types": [FULL] * 3,
    "mamba_n_heads": 4,
}

# Test name -> (architecture, what differs from COMMON).
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 16}),
    "ministral": (
        "MinistralForCausalLM",
        {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 12},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-yarn": ("Qwen3ForCausalLM", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", {"rope_parameters": in_three(2, 2, 2)}),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": in_three(2, 2, 2)}),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {"head_dim": 16, "rope_parameters": in_three(4, 2, 2)}),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "rope_parameters": in_three(4, 2, 2),
        },
    ),
    "ernie": ("Ernie4_5ForCausalLM", {"head_dim": 16, "use_bias": True}),
    "ernie-moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 1},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 16}),
    "seed-oss-biased": ("SeedOssForCausalLM", {"head_dim": 16, "attention_out_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "exaone4-full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": [FULL] * 3}),
    "granite": ("GraniteForCausalLM", GRANITE),
    "granite-moe": ("GraniteMoeForCausalLM", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite4": ("GraniteMoeHybridForCausalLM", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite4-no-positions": ("GraniteMoeHybridForCausalLM", GRANITE4),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10_000.0}, FULL: YARN},
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi4-mini": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "tie_word_embeddings": True},
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "hidden_act": "gelu"}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3-vision": ("Gemma3ForConditionalGeneration", GEMMA3),
    "mistral3-vision": ("Mistral3ForConditionalGeneration", {"sliding_window": None, "model_type": "mistral"}),
    "ministral3": ("Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    "ministral3-vision": (
        "Mistral3ForConditionalGeneration",
        {"head_dim": 16, "model_type": "ministral3", "rope_parameters": MINISTRAL3_ROPE},
    ),
    "glm": ("GlmForCausalLM", {"head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.3,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 16,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gpt-oss-mxfp4": (
        "GptOssForCausalLM",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "sliding_window": WINDOW,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama4": ("Llama4ForCausalLM", LLAMA4),
    "llama4-vision": ("Llama4ForConditionalGeneration", {**LLAMA4, "use_qk_norm": False, "moe_layers": [0, 2]}),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "num_key_value_heads": 4,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": 20, "norm_topk_prob": True}),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            "head_dim": 16,
            "intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek-biased": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": 20, "attention_bias": True, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
}


def make_pair(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Pair:
    torch.manual_seed(0)
    architecture, options = MODELS[name]
    config_class = CONFIG_CLASSES.get(architecture, architecture.replace("ForCausalLM", "Config"))
    fields_of_text = {**COMMON, **options, **changes}
    make = getattr(transformers, config_class)
    is_text = architecture.endswith("ForCausalLM")
    of_all = {"tie_word_embeddings": architecture.startswith("Gemma"), "vision_config": VISION}
    config = make(**fields_of_text) if is_text else make(text_config=fields_of_text, **of_all)
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    assert isinstance(model, PreTrainedModel)
    low, high = (-0.5, 0.5) if name.startswith("gemma") else (0.5, 1.5)  # Gemma stores the weights of norms less 1
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, low, high)
        assert parameter.any() or "layers" not in parameter_name, parameter_name
    if dtype != torch.float32:
        model.to(dtype).save_pretrained(folder)
        return Pair(open_reference(folder, dtype), folder)
    model.save_pretrained(folder)
    return with_mxfp4(folder) if name.endswith("mxfp4") else Pair(model, folder)


def with_mxfp4(folder: Path) -> Pair:
    """Its experts stored as OpenAI publishes them, with random numbers, beside what transformers makes of that."""
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        groups = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(256, (*groups, 16)).to(torch.uint8)
        stored[f"{name}_scales"] = torch.randint(119, 124, groups).to(torch.uint8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Pair(open_reference(folder, torch.float32, quantization_config=Mxfp4Config(dequantize=True)), folder)
