"""The step that is being planned: its rows, and what is left of the room for more. Pages are counted here."""

from __future__ import annotations

import math

from niwaki.runtime.loop.plans import Room, Row, Running, Waiting

# One piece of a prompt in a step has no fewer tokens than this for all that stands before them, or it would take as
# many steps as it has tokens: that of the long prefill which others may pass, so that it ends; else the first.
LEAST_PIECE = 16
# Of the tokens that a running request may still generate, this share has its pages kept free when others are admitted.
# 0 would admit until decoding itself preempts; 1 would leave most of the pool idle, since few use all their budget.
GROWTH_SHARE = 0.3


class Step:
    """The step being planned: its rows, and what is left of the room."""

    def __init__(self, room: Room) -> None:
        self.page_size = room.page_size
        self.shares_prefixes = room.shares_prefixes
        self.tokens_left = room.max_batch_tokens
        self.keys_per_token: float | None = None  # else a token behind so many others counts as two
        self.least_of: int | None = None  # whose piece is LEAST_PIECE at least; None: the first one
        self._has_piece = False
        self.slots_left = room.max_running
        self.free_pages = room.free_pages
        self.rows: list[Row] = []
        self.promised_pages = 0  # of running requests: the rest of their prompts, and some growth

    def add_running(self, request: Running, *, leaving: int = 0) -> None:
        """A row of as many pending tokens as pages and the budget, but for `leaving`, allow, none if that is none."""
        self.slots_left -= 1
        budget = self.tokens_left - leaving
        most = self._affordable(request.id, request.num_computed, budget)
        num_tokens = max(0, min(request.num_pending, most, self._num_on_pages(request)))
        if num_tokens:
            self.rows.append(Row(request.id, num_tokens))
            self._pay(request.num_computed, num_tokens, budget)
        new_pages = missing_pages(request, request.num_computed + num_tokens, self.page_size)
        self.free_pages -= new_pages
        self.promised_pages += expected_pages(request, self.page_size) - new_pages

    def num_first(self, request: Waiting, num_found: int) -> int:
        """Tokens of its first row, behind those that it takes from the cache."""
        return min(len(request.ids) - num_found, self._affordable(request.id, num_found, self.tokens_left))

    def add_admitted(self, request: Waiting, num_found: int, num_tokens: int) -> None:
        """With a first row of `num_tokens`, by `num_first`."""
        self.rows.append(Row(request.id, num_tokens))
        self._pay(num_found, num_tokens, self.tokens_left)

    def is_filled_by(self, prefill: Running) -> bool:
        return prefill.num_pending > self._affordable(prefill.id, prefill.num_computed, self.tokens_left)

    def has_page_for(self, prefill: Running) -> bool:
        return self._num_on_pages(prefill) > 0

    def _num_on_pages(self, request: Running) -> int:
        return (request.num_pages + max(0, self.free_pages)) * self.page_size - request.num_computed

    def _affordable(self, number: int, start: int, budget: int) -> int:
        """Tokens of a request behind `start` others, for so many at the start of a text."""
        if self.keys_per_token is None:
            return budget
        has_least = not self._has_piece if self.least_of is None else number == self.least_of
        return max(int(budget / (1 + start / self.keys_per_token)), min(budget, LEAST_PIECE) if has_least else 0)

    def _pay(self, start: int, num_tokens: int, budget: int) -> None:
        """A least piece may be more work than its budget: what was left for others is theirs all the same."""
        if self.keys_per_token is not None:
            self._has_piece = True
            num_tokens = min(budget, self.work_of(start, num_tokens))
        self.tokens_left -= num_tokens

    def work_of(self, start: int, num_tokens: int) -> int:
        """Of tokens behind `start` others: as that of how many at the start of a text."""
        if self.keys_per_token is None:
            return num_tokens
        return math.ceil(num_tokens * (1 + start / self.keys_per_token))

    def lengthen(self, request: Running) -> None:
        """The row of a prefill, whose pages are promised, by what tokens are left."""
        for at, row in enumerate(self.rows):
            if row.id == request.id:
                self.least_of = None  # it has that
                more = self._affordable(request.id, request.num_computed, self.tokens_left)
                num_tokens = min(request.num_pending, row.num_tokens + more)
                self.rows[at] = Row(request.id, num_tokens)
                self._pay(request.num_computed, num_tokens - row.num_tokens, self.tokens_left)


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def growth_tokens(max_new_tokens: int, page_size: int) -> int:
    """Room for how many more tokens is kept for a request: a share of what it may generate, a page at least."""
    return min(max_new_tokens, max(page_size, int(max_new_tokens * GROWTH_SHARE)))


def missing_pages(request: Running, num_tokens: int, page_size: int) -> int:
    return max(0, pages_for(num_tokens, page_size) - request.num_pages)


def expected_pages(request: Running, page_size: int) -> int:
    """Pages that it lacks for the tokens that are known, and for the growth for which room is kept."""
    return missing_pages(request, request.num_tokens + growth_tokens(request.max_new_tokens, page_size), page_size)
