"""What llama.cpp's, Ollama's and other servers call pages and fields, told where one is not found. Plain data.

Fields that are taken by another name are in `other_servers`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from niwaki.runtime.api.names import Names, all_of, hint

PAGES: Final[Names] = MappingProxyType(
    {
        **all_of("/v1/completions", "/completion /api/generate"),
        **all_of("/v1/chat/completions", "/api/chat"),
        **all_of("/v1/embeddings", "/embedding /api/embed /api/embeddings"),
        **all_of("/v1/models", "/api/tags"),
        **all_of("/server_info", "/props /version"),
        **all_of("/metrics", "/slots"),
    }
)
FIELDS: Final[Names] = MappingProxyType(
    {
        **all_of("max_tokens", "n_predict num_predict max_length max_new_tokens"),
        **all_of("repetition_penalty", "repeat_penalty"),
        **all_of("stop", "stop_sequences stop_strings"),
        **all_of("ebnf", "gbnf"),
        **all_of("leave it out: what prompts share is computed once", "cache_prompt id_slot"),
        "options": "they stand beside it, by OpenAI's names",
        "response_format.schema": "write {'type': 'json_schema', 'json_schema': {'name': 'answer', 'schema': ...}}",
    }
)


def hint_of_page(path: str) -> str:
    """To be set behind the fault; empty where nobody knows."""
    return f"; here it is {PAGES[path]}" if path in PAGES else ""


def hint_of_field(param: str) -> str:
    """Likewise."""
    return hint(param, FIELDS, ())
