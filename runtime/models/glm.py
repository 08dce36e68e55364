"""GLM 4: half of each head turned, neighbouring channels together, and fused gates and ups; from 0414 on with norms
behind the blocks, too.

GLM 4.5 and later mixtures: heads turned as in Llama, by half, and DeepSeek V3's experts.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Family, LayerNames, ModelConfig
from niwaki.runtime.models.deepseek import corrected_experts, with_experts
from niwaki.runtime.models.fields import Fields, flag


def _glm(raw: Fields, llama: ModelConfig) -> ModelConfig:
    names = LayerNames(gate_up=("mlp.gate_up_proj",))
    return replace(_biased(llama), is_rope_interleaved=True, names=names)


def _glm4(raw: Fields, llama: ModelConfig) -> ModelConfig:
    glm = _glm(raw, llama)
    names = replace(glm.names, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
    return replace(glm, names=names)


def _glm4_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    mixture = with_experts(raw, _biased(llama), corrected_experts(raw))
    return replace(mixture, qk_norm="head" if flag(raw, "use_qk_norm") else None)


def _biased(llama: ModelConfig) -> ModelConfig:
    """What attention puts out has no bias, whatever queries, keys and values have."""
    return replace(llama, qkv_bias=llama.attention_bias, attention_bias=False, mlp_bias=False)


DEFAULTS: dict[str, object] = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}
GLM = Family(_glm, DEFAULTS, may_turn_part=True)
GLM4 = Family(_glm4, DEFAULTS, may_turn_part=True)
GLM4_MOE = Family(
    _glm4_moe,
    {
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    may_turn_part=True,
)
