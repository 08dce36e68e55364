"""The model architectures: a name in config.json leads to a family, loaded when it is needed.

A family (`Family` in config.py) says what sets an architecture apart from Llama; one decoder runs them all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from niwaki.runtime.models.config import Family

# architecture -> "module:name"
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "niwaki.runtime.models.llama:LLAMA",
    "MistralForCausalLM": "niwaki.runtime.models.mistral:MISTRAL",
    "MinistralForCausalLM": "niwaki.runtime.models.mistral:MINISTRAL",
    "Ministral3ForCausalLM": "niwaki.runtime.models.mistral:MINISTRAL3",
    "Qwen2ForCausalLM": "niwaki.runtime.models.qwen:QWEN2",
    "Qwen3ForCausalLM": "niwaki.runtime.models.qwen:QWEN3",
    "Qwen2VLForConditionalGeneration": "niwaki.runtime.models.qwen:QWEN2_VL",
    "Qwen2_5_VLForConditionalGeneration": "niwaki.runtime.models.qwen:QWEN2_5_VL",
    "Qwen3VLForConditionalGeneration": "niwaki.runtime.models.qwen:QWEN3_VL",
    "Qwen3VLMoeForConditionalGeneration": "niwaki.runtime.models.qwen:QWEN3_VL_MOE",
    "GraniteForCausalLM": "niwaki.runtime.models.granite:GRANITE",
    "GraniteMoeForCausalLM": "niwaki.runtime.models.granite:GRANITE_MOE",
    "GraniteMoeHybridForCausalLM": "niwaki.runtime.models.granite:GRANITE4",
    "Olmo2ForCausalLM": "niwaki.runtime.models.olmo:OLMO2",
    "Olmo3ForCausalLM": "niwaki.runtime.models.olmo:OLMO3",
    "SmolLM3ForCausalLM": "niwaki.runtime.models.smollm3:SMOLLM3",
    "SeedOssForCausalLM": "niwaki.runtime.models.seed_oss:SEED_OSS",
    "Exaone4ForCausalLM": "niwaki.runtime.models.exaone4:EXAONE4",
    "Ernie4_5ForCausalLM": "niwaki.runtime.models.ernie:ERNIE",
    "Ernie4_5_MoeForCausalLM": "niwaki.runtime.models.ernie:ERNIE_MOE",
    "Phi3ForCausalLM": "niwaki.runtime.models.phi3:PHI3",
    "GlmForCausalLM": "niwaki.runtime.models.glm:GLM",
    "Glm4ForCausalLM": "niwaki.runtime.models.glm:GLM4",
    "GemmaForCausalLM": "niwaki.runtime.models.gemma:GEMMA",
    "Gemma2ForCausalLM": "niwaki.runtime.models.gemma:GEMMA2",
    "Gemma3ForCausalLM": "niwaki.runtime.models.gemma:GEMMA3",
    "Gemma3ForConditionalGeneration": "niwaki.runtime.models.gemma:GEMMA3_OF_VISION",
    "Mistral3ForConditionalGeneration": "niwaki.runtime.models.mistral:MISTRAL_OF_VISION",
    "MixtralForCausalLM": "niwaki.runtime.models.mistral:MIXTRAL",
    "Qwen2MoeForCausalLM": "niwaki.runtime.models.qwen:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "niwaki.runtime.models.qwen:QWEN3_MOE",
    "OlmoeForCausalLM": "niwaki.runtime.models.olmo:OLMOE",
    "GptOssForCausalLM": "niwaki.runtime.models.gpt_oss:GPT_OSS",
    "MiniMaxM2ForCausalLM": "niwaki.runtime.models.minimax_m2:MINIMAX_M2",
    "Glm4MoeForCausalLM": "niwaki.runtime.models.glm:GLM4_MOE",
    "Llama4ForCausalLM": "niwaki.runtime.models.llama4:LLAMA4",
    "Llama4ForConditionalGeneration": "niwaki.runtime.models.llama4:LLAMA4_OF_VISION",
    "DeepseekV2ForCausalLM": "niwaki.runtime.models.deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "niwaki.runtime.models.deepseek:DEEPSEEK_V3",
    "Glm4MoeLiteForCausalLM": "niwaki.runtime.models.deepseek:GLM4_MOE_LITE",
}


def family_of(architecture: str) -> Family:
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: Family = getattr(import_module(module), name)
    return found
