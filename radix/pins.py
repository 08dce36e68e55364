"""The pins of a cache: which nodes they keep, and when they end by themselves."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

from niwaki.radix.handles import Pin, demand_open, home
from niwaki.radix.tree import Node


class Pins:
    """All open pins."""

    def __init__(self) -> None:
        self._open: dict[Pin, None] = {}
        self._deadlines: list[tuple[float, int, Pin]] = []  # with a serial number, for pins have no order
        self._num_timed = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, node: Node, until: float | None) -> Pin:
        node.pins += 1
        pin = Pin(node, until)
        self._open[pin] = None
        if until is not None:
            self._num_timed += 1
            heappush(self._deadlines, (until, self._num_timed, pin))
        return pin

    def close(self, pin: Pin) -> Node:
        """Returns the node that it kept, which the tree has yet to unpin. A closed pin is an error (ValueError)."""
        demand_open(pin)
        pin._is_open = False
        del self._open[pin]
        return home(pin)

    def due(self, now: float) -> list[Pin]:
        """Those whose time has come; they are told once."""
        found: list[Pin] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            pin = heappop(self._deadlines)[2]
            if pin._is_open:
                found.append(pin)
        return found

    def counts(self) -> Counter[Node]:
        """How many there are on each node, for `Cache.check`."""
        assert all(pin._is_open for pin in self._open), "only open pins are known"
        return Counter(map(home, self._open))
