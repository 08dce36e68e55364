"""The plan of a batch that goes on: what `next_plan` fills anew is what `make_plan` would lay out."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from niwaki.kernels.plan import AttentionPlan, Shared, Spans, make_plan, next_plan
from niwaki.kernels.segments import Costs

PAGE, PAGES, LONGEST = 4, 400, 3
CHEAP = Costs(paged_pair=10.0, dense_pair=1.0, key=1.0, query=1.0, segment=1.0)
DEAR = Costs(paged_pair=10.0, dense_pair=1.0, key=1.0, query=1.0, segment=1e9)


def branches(rng: np.random.Generator, most: int = 1) -> Spans:
    """Rows of up to so many tokens below shared pages, two levels of them, each behind tokens of its own and with pages
    for 20 more."""
    count = int(rng.integers(1, 9))
    trunk, forks = [*range(6)], [[*range(6, 9)], [*range(9, 13)]]
    starts, tables, fresh = [], [], 13
    for _ in range(count):
        shared = trunk[: rng.integers(0, 7)]
        if len(shared) == len(trunk):
            shared = shared + forks[rng.integers(2)]
        own = int(rng.integers(0, 10))
        num_pages = -(-(own + 20 + most) // PAGE)
        tables.append([*shared, *range(fresh, fresh + num_pages)])
        fresh += num_pages
        starts.append(PAGE * len(shared) + own)
    held = np.array([len(table) for table in tables], np.int64)
    table = np.zeros((count, int(held.max())), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    return Spans(np.array(starts, np.int64), rng.integers(1, most + 1, count), table, held)


def arrays_of(plan: object) -> dict[str, object]:
    """All that a plan says, with arrays as lists."""
    found: dict[str, object] = {}
    for each in fields(plan):  # type: ignore[arg-type]  # a dataclass
        value = getattr(plan, each.name)
        if isinstance(value, np.ndarray):
            found[each.name] = value.tolist()
        else:
            found[each.name] = arrays_of(value) if hasattr(value, "__dataclass_fields__") else value
    return found


def made(spans: Spans, costs: Costs | None) -> AttentionPlan:
    return make_plan(spans, page_size=PAGE, num_pages=PAGES, longest_paged=LONGEST, costs=costs)


def rows_of(plan: AttentionPlan | Shared) -> list[tuple[int, int, int, list[int], int]]:
    """The rows of many tokens, one by one."""
    return [(row.first, row.count, row.start, row.page_ids.tolist(), row.first_key) for row in plan.prefill]


@pytest.mark.parametrize("most", [1, 2 * LONGEST])
@pytest.mark.parametrize("costs", [CHEAP, DEAR, None])
def test_the_next_plans_are_those_that_would_be_made(costs: Costs | None, most: int) -> None:
    rng = np.random.default_rng(7)
    shared: set[type | None] = set()
    for _ in range(40):
        spans = branches(rng, most)
        plan = made(spans, costs)
        for _ in range(20):
            spans.starts[:] += 1
            plan, wanted = next_plan(plan, spans, num_pages=PAGES, longest_paged=LONGEST), made(spans, costs)
            assert arrays_of(plan) == arrays_of(wanted)
            assert rows_of(plan) == rows_of(wanted)
            if plan.shared is not None and wanted.shared is not None:
                assert rows_of(plan.shared) == rows_of(wanted.shared)
        shared.add(None if plan.shared is None else Shared)
    assert shared == ({Shared, None} if costs is CHEAP else {None})


def test_what_no_plan_may_hold_is_refused_the_next_time_too() -> None:
    one = np.ones(1, np.int64)
    spans = Spans(3 * one, one, np.zeros((1, 1), np.int32), one)
    plan = made(spans, None)
    spans.starts[:] = 4
    with pytest.raises(ValueError, match="row 0 needs 2 pages"):
        next_plan(plan, spans, num_pages=PAGES, longest_paged=LONGEST)
    spans.starts[:], spans.table[0, 0] = 3, PAGES
    with pytest.raises(ValueError, match="outside the pool"):
        next_plan(plan, spans, num_pages=PAGES, longest_paged=LONGEST)
