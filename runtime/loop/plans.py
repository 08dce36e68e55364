"""Who waits and who runs, the room that there is, and the plan of a step: what the scheduler is told and answers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from niwaki.runtime.options.limits import TokenIds

# In a short pool whoever has waited longest goes before any longer prefix match of its priority, one at a time: all at
# once, they would drive out what the others are about to continue. It is his turn when so many times the tokens that he
# brings were admitted since the last one, so that of all tokens a fifteenth is admitted in order of arrival;
AGED_TOKENS = 14
# or when he has waited for so many steps, and nobody had such a turn in them: a long text among short ones.
AGED_STEPS = 64


class Waiting(msgspec.Struct, frozen=True, gc=False):  # a dataclass takes 20 times as long to make
    """A request that holds no pages. Equal ones are in order of arrival; a preempted one keeps its place. Nothing of it
    changes from plan to plan but what of it is cached: how long it has waited follows from the clocks of `Room`."""

    id: int
    ids: TokenIds  # all known tokens: the prompt, and what it had generated before a preemption
    max_new_tokens: int  # still to come
    num_cached: int = 0  # of `ids`, by `Cache.peek`; at most `most_cached` are used
    num_locked_pages: int = 0  # of these, full pages that running requests hold already (`Cache.peek`)
    priority: int = 0  # higher goes first
    first_step: int = 0  # since which it waits, had it waited all at once
    waits_from: float = 0.0  # likewise, in seconds
    namespace: str = ""
    max_cached: int | None = None  # tokens that it may take from the cache; None: all but the last
    program: int | None = None  # `fairness`
    is_set_back: bool = False  # it ran, and was preempted

    @property
    def most_cached(self) -> int:
        """All but the last at most: that one is computed in any case, for its logits."""
        last = len(self.ids) - 1
        return last if self.max_cached is None else min(last, self.max_cached)


class Running(msgspec.Struct, frozen=True, gc=False):
    """A request that holds pages. `running` lists stand in order of admission."""

    id: int
    num_tokens: int  # known
    num_computed: int  # of these, whose KV is written; less than num_tokens, but while it sits a step out (`late.py`)
    num_pages: int  # held
    max_new_tokens: int  # still to come
    num_exclusive_pages: int | None = None  # pages that preempting it gives back (`Cache.num_exclusive`); None: all
    priority: int = 0
    ids: TokenIds | None = None  # known tokens; while it prefills, others wait for them instead of repeating it
    namespace: str = ""
    waited_seconds: float = 0.0  # before it was admitted, and without a row that it could have had
    program: int | None = None

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed


class Room(msgspec.Struct, frozen=True, gc=False):
    """What a step may use."""

    free_pages: int  # free and evictable
    page_size: int
    max_batch_tokens: int  # rows of one step, all together
    max_running: int
    step: int = 0  # the number of this one
    now: float = 0.0  # seconds
    shares_prefixes: bool = True  # off: the prefix cache is, and nobody waits for what another computes
    num_pages: int = 0  # of the pool; 0: not known, and it counts as short
    since_aged: int = AGED_STEPS  # steps since one was last admitted for its long wait (`Plan.aged`)
    tokens_since_aged: int = 0  # that were admitted since, with what is kept free for their growth
    max_prompt_tokens: int | None = None  # of a step's, in rows of prefills and admissions; None: all that is left
    keys_per_token: float | None = None  # as `memory.keys_per_token`: how much fewer these are behind others
    max_lower_tokens: int | None = None  # the same, of those below priority `highest`
    highest: int = 0
    admits_alone: bool = False  # where some find a place before lower ones who run, these sit the step out


class Row(msgspec.Struct, frozen=True, gc=False):
    """Compute the next `num_tokens` tokens of request `id`."""

    id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Preempt, then admit, then run the rows. Admitted requests have a row, preempted ones have none."""

    rows: tuple[Row, ...] = ()
    admit: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    aged: int | None = None  # who of `admit` goes first because it waited so long
    is_alone: bool = False  # some who run sit it out, for those of a higher priority who are admitted

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
