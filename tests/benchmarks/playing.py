"""How the stories of `mixed` are told: one on one engine, move by move, and each of them by a cold engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from niwaki.runtime.api import (
    Branch,
    Cancelled,
    CapacityError,
    Delta,
    Generation,
    GenerationError,
    Output,
    Pending,
    Score,
    Segment,
    TimedOut,
)
from niwaki.runtime.engine import Engine
from tests.benchmarks.stepping import Stepped, answer
from tests.benchmarks.stories import Back, Fork, Gen, Ids, Pick, Say, Story

Told = tuple[object, ...]


@dataclass(eq=False)
class Playing:
    """One story on one engine: each move begins when the one before is answered."""

    engine: Engine
    story: Story
    namespace: str = ""
    streams: bool = False
    at: int = 0
    pending: Pending[tuple[Output, ...]] | Pending[tuple[Score, ...]] | None = None
    deltas: list[Delta] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    branch: Branch | None = None
    left: list[Branch] = field(default_factory=list)
    is_too_long: bool = False  # for the pool
    num_again: int = 0  # times that a text was cancelled and asked for again

    def known_ids(self) -> Sequence[int]:
        """Tokens of its text, as far as it is there."""
        if self.branch is not None:
            return self.branch.token_ids
        return self.story[0].ids if isinstance(self.story[0], Ids) else ()

    @property
    def is_over(self) -> bool:
        return self.is_too_long or (self.at == len(self.story) and self.pending is None)

    def begin(self) -> None:
        """The next move, which may have to be answered."""
        backend, move = self.engine.backend, self.story[self.at]
        if isinstance(move, Ids):
            self.pending = backend.start(np.array(move.ids, np.int32), move.params, self.namespace)
        else:
            if self.branch is None:
                self.branch = backend.open(namespace=self.namespace)
            branch = self.branch
            match move:
                case Say(text, is_control):
                    backend.append(branch, [Segment(text, is_control)])
                    self.at += 1
                case Fork():
                    self.left.append(branch)
                    self.branch = backend.fork(branch)
                    self.at += 1
                case Back():
                    if self.left:
                        backend.close(branch)
                        self.branch = self.left.pop()
                    self.at += 1
                case Gen(text, params):
                    self.pending = backend.generate(branch, [Segment(text)], params)
                case Pick(text, choices, heal, unconditional):
                    self.pending = backend.score(
                        branch, [Segment(text)], choices, heal=heal, unconditional=unconditional
                    )
        self._listen()

    def _listen(self) -> None:
        if self.streams and isinstance(self.pending, Generation):
            self.deltas = []
            self.pending.add_delta_callback(self.deltas.append)

    def end(self) -> None:
        """Wait for the answer. Raises what it failed with; then the whole story has to be told again."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if isinstance(pending, Generation):
            outputs = answer(self.engine, pending)
            self.outputs += outputs
            self.told.append(tuple(map(told_of, outputs)))
            if self.streams:
                assert "".join(delta.text for delta in self.deltas) == outputs[0].text, "pieces add up to the text"
                ids = tuple(token for delta in self.deltas for token in delta.token_ids)
                assert ids == outputs[0].token_ids, f"pieces say {ids}, all is {outputs[0].token_ids}"
        else:
            scores: tuple[Score, ...] = answer(self.engine, pending)  # type: ignore[arg-type]  # no Generation
            self.told.append(tuple((score.text, tuple(map(tuple, score.logprobs))) for score in scores))
        self.at += 1

    def ask_again(self) -> None:
        """Cancel the text that is under way, unless it is there, and ask for it once more where its branch stands."""
        move = self.story[self.at] if self.pending is not None else None
        if not isinstance(move, Gen) or self.branch is None:
            return
        assert self.pending is not None
        self.pending.cancel()
        with suppress(Cancelled):
            self.end()
            return
        self.num_again += 1
        self.pending = self.engine.backend.generate(self.branch, [], move.params)
        self._listen()

    def is_late(self) -> bool:
        """Whether what is under way is not there yet: somebody waits for it no longer, and asks again later."""
        if self.pending is None or self.pending.is_done:
            return False
        try:
            self.pending.result(timeout=0.0005)
        except TimedOut:
            return True
        except (Cancelled, GenerationError, CapacityError):
            pass  # told when the move ends
        return False

    def step(self) -> None:
        if self.pending is not None:
            self.end()
        elif not self.is_over:
            self.begin()

    def close(self) -> None:
        for branch in (self.branch, *self.left):
            if branch is not None:
                self.engine.backend.close(branch)
        self.branch, self.left = None, []

    def again(self) -> Playing:
        self.close()
        return Playing(self.engine, self.story, self.namespace, self.streams)


def told_of(output: Output) -> Told:
    """All that must not hang on who else runs, nor on what is cached."""
    return (
        output.text, output.token_ids, output.finish_reason, output.complete, output.prompt_tokens, output.forced,
        output.allowed, output.logprobs, output.top_logprobs, output.prompt_logprobs, output.prompt_top_logprobs,
    )  # fmt: skip


class Solo:
    """How each story is told by a cold engine."""

    def __init__(self, folder: Path, page_size: int) -> None:
        self._engine = Stepped(
            folder, kv_tokens=2048, page_size=page_size, enable_prefix_cache=False, deterministic=True, draft_tokens=0
        )
        self._known: dict[Story, list[Told]] = {}

    def __call__(self, story: Story) -> list[Told]:
        if story not in self._known:
            playing = Playing(self._engine, story)
            while not playing.is_over:
                playing.step()
            playing.close()
            self._known[story] = playing.told
        return self._known[story]

    def close(self) -> None:
        self._engine.shutdown()
