"""The dynamic scope of a place (2020-12 core 7.1, 8.2.3.2): which schema resources were entered on the way to it.

Of a scope one thing matters: for each dynamic anchor the first resource entered that has it. A place in a scope is its
JSON pointer behind the number of the scope, `~s3/properties/a`; keywords go on writing pointers behind it, and whatever
is known of a place is known of it in its scope. No pointer begins with `~`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Bound: TypeAlias = tuple[tuple[str, str], ...]  # (anchor, the pointer that it leads to), the first one entered first


def plain(place: str) -> str:
    """The JSON pointer of a place in a scope."""
    return place[place.find("/") :] if "/" in place else ""


class Scopes:
    """`anchors`: the dynamic anchors of each resource that has some, by the pointer of the resource."""

    def __init__(self, anchors: Mapping[str, Mapping[str, str]]) -> None:
        self._anchors = {resource: anchors[resource] for resource in sorted(anchors, key=len)}
        self._known: list[tuple[str, Bound]] = []  # by number: the resource entered last, and what is bound in it
        self._numbers: dict[tuple[str, Bound], int] = {}

    def entered(self, bound: Bound, resource: str, pointer: str) -> str:
        """The place at a pointer into a resource that is reached where so much is bound."""
        scope = (resource, self._with(bound, resource))
        number = self._numbers.setdefault(scope, len(self._known))
        if number == len(self._known):
            self._known.append(scope)
        return f"~s{number}{pointer}"

    def bound(self, place: str) -> Bound:
        """What is bound at a place: also by the resources that lie around it in the one that was entered."""
        pointer = plain(place)
        resource, bound = self._known[int(place[2 : len(place) - len(pointer)])]
        for inner in self._anchors:  # outer ones first
            if inner.startswith(f"{resource}/") and f"{pointer}/".startswith(f"{inner}/"):
                bound = self._with(bound, inner)
        return bound

    def _with(self, bound: Bound, resource: str) -> Bound:
        known = {name for name, _ in bound}
        new = self._anchors.get(resource, {})
        return bound + tuple((name, pointer) for name, pointer in sorted(new.items()) if name not in known)
