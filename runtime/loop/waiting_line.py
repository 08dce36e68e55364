"""Who waits: in order of arrival, and the first of each kind, without a look at the others.

Owned by `roster.Roster`. A kind is a priority of a caller's program. What a step looks at does not grow with the line.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from niwaki.runtime.requests.request import Request

Kind = tuple[int, str, int | None]  # priority, namespace, program
_ARRIVAL: Final = attrgetter("id")  # ids ascend with arrival


class WaitingLine:
    """Each request once. Lists by kind, none of them empty."""

    def __init__(self) -> None:
        self._all: list[Request] = []
        self._kinds: dict[Kind, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all)

    def __getitem__(self, place: int) -> Request:
        return self._all[place]

    def add(self, request: Request) -> None:
        """In its place by arrival: one that was set back has its old one."""
        for line in (self._all, self._kinds.setdefault(_kind_of(request), [])):
            if line and line[-1].id > request.id:
                insort(line, request, key=_ARRIVAL)
            else:
                line.append(request)

    def remove(self, request: Request) -> None:
        kind = _kind_of(request)
        for line in (self._all, self._kinds[kind]):
            del line[bisect_left(line, request.id, key=_ARRIVAL)]
        if not self._kinds[kind]:
            del self._kinds[kind]

    def find(self, number: int) -> Request:
        """The one of this id, which waits."""
        return self._all[bisect_left(self._all, number, key=_ARRIVAL)]

    def priorities(self) -> set[int]:
        return {priority for priority, *_ in self._kinds}

    def first_of_each(self, most: int, outranked: int | None = None) -> Sequence[Request]:
        """So many of each kind at most, in order of arrival; all, where they are no more than that. `outranked`: a
        priority of which, and of lower ones, nobody is wanted."""
        kinds = [line for kind, line in self._kinds.items() if outranked is None or kind[0] > outranked]
        if len(kinds) == len(self._kinds) and len(self._all) <= most:
            return self._all
        if len(kinds) == 1:
            return kinds[0][:most]
        return sorted((one for line in kinds for one in line[:most]), key=_ARRIVAL)

    def oldest_below(self, priority: int) -> Iterator[Request]:
        """Of each kind of a lower priority, who has come first."""
        return (line[0] for kind, line in self._kinds.items() if kind[0] < priority)

    def check(self) -> None:
        """Raises AssertionError where both orders do not say the same."""
        apart = [request for line in self._kinds.values() for request in line]
        assert all(self._kinds.values()), "a kind of which nobody waits"
        assert sorted(apart, key=_ARRIVAL) == self._all, "each waits once, in order of arrival"
        assert all(_kind_of(one) == kind for kind, line in self._kinds.items() for one in line), "a wrong kind"


def _kind_of(request: Request) -> Kind:
    return request.params.priority, request.namespace, request.job.program
