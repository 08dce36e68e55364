"""A scripted backend whose values their budgets may make shorter: a stand-in for an engine that closes them."""

from __future__ import annotations

from dataclasses import replace

import niwaki as nw
from niwaki.runtime.api import FinishReason, Output, SamplingParams


class Shortening(nw.ScriptedBackend):
    """Says of each value with "cut" in it that its budget closed it: at `length`, and complete."""

    def _answer(self, prompt: str, params: SamplingParams, num_prompt: int, num_cached: int) -> Output:
        output = super()._answer(prompt, params, num_prompt, num_cached)
        return replace(output, finish_reason=FinishReason("length")) if "cut" in output.text else output
