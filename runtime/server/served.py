"""What is served: the engine as the server asks it, what requests need of its model, and one sequence of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import numpy as np

from niwaki.radix.outline import OutlineNode
from niwaki.runtime.api import BackendInfo, CapacityError, Generation, SamplingParams, Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.chat import Prompts
from niwaki.runtime.server.errors import ApiError


class ServedEngine(Protocol):
    """What the server asks of an engine, in this process or in another. Every method may be called on any thread."""

    @property
    def is_alive(self) -> bool:
        """Whether it answers; never waits for model work."""
        ...

    def start(
        self,
        ids: TokenIds,
        params: SamplingParams,
        namespace: str = "",
        *,
        logits_from: int | None = None,
        streams: bool | None = True,
    ) -> Generation:
        """Generate; without `streams` nobody will read pieces, with None somebody may.

        Raises:
            RequestError, ConstraintError, CapacityError: where it can tell at once.
        """
        ...

    def flush(self) -> bool: ...

    def outline(self, limit: int, namespace: str = "") -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree, at most `limit` nodes of it."""
        ...

    def usage(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The side of a model that the server itself needs: its tokenizer, its template and its limits."""

    info: BackendInfo
    tokenizer: Tokenizer
    prompts: Prompts
    vocab_size: int
    longest: int  # tokens of prompt and answer together that the context and an empty pool hold
    max_running: int
    settings: Mapping[str, object]  # for /server_info: nothing secret

    def encode(self, text: str | Sequence[Segment]) -> TokenIds:
        segments = [Segment(text)] if isinstance(text, str) else text
        return np.array(self.tokenizer.encode(segments, at_start=True), dtype=np.int32)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        pieces = [(self.tokenizer.bytes_of(one), one) for one in token_ids]
        written = [self.tokenizer.token_text(one).encode() if piece is None else piece for piece, one in pieces]
        return b"".join(written).decode("utf-8", errors="replace")

    def ids(self, token_ids: Sequence[int], param: str) -> TokenIds:
        """Token ids from a client.

        Raises:
            ApiError: one is outside the vocabulary.
        """
        found = np.array(token_ids, dtype=np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < self.vocab_size:
            raise ApiError(400, f"{param}: token ids must be from 0 to {self.vocab_size - 1}", param=param)
        return found.astype(np.int32)

    def check_prompt(self, prompt: str | Sequence[int], param: str) -> None:
        """Before it is tokenized, for which others of its length are waited for. Raises ApiError: it can never fit."""
        if isinstance(prompt, str):
            self.check_chars(len(prompt), param)
        elif len(prompt) > self.longest:
            self._refuse(param, f"{len(prompt)}")

    def check_chars(self, count: int, param: str) -> None:
        """As `check_prompt`, for a text of so many characters."""
        if count <= self.longest:  # then it may fit, and a large vocabulary is not looked through for its first text
            return
        most = self.tokenizer.most_chars
        if most is not None and count > most * self.longest:
            self._refuse(param, f"at least {-(-count // most)}")

    def _refuse(self, param: str, count: str) -> NoReturn:
        message = f"{param} has {count} tokens; at most {self.longest} fit"
        raise ApiError(400, message, param=param, code="context_length_exceeded")

    def room(self, ids: TokenIds, param: str) -> int:
        """Tokens that may still be generated behind a prompt. Raises CapacityError when not one may."""
        room = self.longest - len(ids)
        if room < 1:
            raise CapacityError(f"{param} has {len(ids)} tokens; at most {self.longest - 1} fit with one new one")
        return room


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence to generate."""

    ids: TokenIds
    params: SamplingParams
    namespace: str
    logits_from: int | None = None


def works_of(ids: TokenIds, params: SamplingParams, namespace: str, logits_from: int | None = None) -> list[Work]:
    """n sequences of one prompt, each a request of its own so that each can be streamed; the tree shares the prompt.

    Their seeds are those that one request with n would have had.
    """
    return [
        Work(
            ids,
            replace(params, n=1, seed=None if params.seed is None else (params.seed + index) % 2**63),
            namespace,
            logits_from,
        )
        for index in range(params.n)
    ]
