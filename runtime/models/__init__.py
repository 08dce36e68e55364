"""The model architectures: a name in config.json leads to a class, loaded when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from niwaki.runtime.models.llama import Llama

# architecture -> "module:Class"
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "niwaki.runtime.models.llama:Llama",
}


def model_class(architecture: str) -> type[Llama]:
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[Llama] = getattr(import_module(module), name)
    return found
