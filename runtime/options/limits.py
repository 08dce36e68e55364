"""What a model and its pool can hold: the checks of a request that need neither, nor torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from niwaki.radix.paths import TokenIds as TokenIds  # the runtime has it from here
from niwaki.runtime.api import CapacityError, RequestError, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of the context and of an empty KV pool; token ids are below `vocab_size`."""

    context_length: int
    pool_tokens: int
    vocab_size: int

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer together that can ever fit."""
        return min(self.context_length, self.pool_tokens)

    def check(self, ids: TokenIds, params: SamplingParams) -> None:
        """Raises RequestError for no token or one outside the vocabulary, CapacityError for too many."""
        if not len(ids):
            raise RequestError("the prompt has no token; this model adds none by itself, so give it some text")
        size = self.vocab_size
        if int(ids.view(np.uint32).max()) >= size:  # below 0 is above all as an unsigned number
            raise RequestError(f"token ids must be from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}")
        for token_id in (*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)):
            if not 0 <= token_id < size:
                raise RequestError(f"token id {token_id} is not in the vocabulary of {size}")
        self.check_room(len(ids), params.max_new_tokens)

    def check_room(self, num_prompt: int, num_new: int) -> None:
        """Raises CapacityError."""
        if num_prompt + num_new > self.longest:
            left = self.longest - num_prompt
            what, remedy = "KV pool (raise kv_tokens)", ""
            if self.longest == self.context_length:
                what, remedy = "context", f"; max_tokens={left} would fit" if left > 0 else "; shorten the text"
            raise CapacityError(
                f"{num_prompt} prompt tokens and {num_new} new ones need {num_prompt + num_new} tokens; "
                f"the {what} holds {self.longest}{remedy}"
            )
