"""What an engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Tokens and requests since the start."""

    steps: int = 0
    prefilled_tokens: int = 0  # prompt tokens that the model computed, each once
    cached_tokens: int = 0  # prompt tokens that the cache gave, but for those given back after a preemption
    generated_tokens: int = 0
    forced_tokens: int = 0  # of the generated ones: written without asking the model
    drafted_tokens: int = 0  # of the generated ones: guessed, and found right in one step with those before them
    guessed_tokens: int = 0  # all guesses, right or wrong
    recomputed_tokens: int = 0  # of prompts and texts: computed once more after a preemption
    preemptions: int = 0
    finished: int = 0
    failed: int = 0

    def clear(self) -> None:
        """Count from here on."""
        for field in fields(self):
            setattr(self, field.name, 0)
