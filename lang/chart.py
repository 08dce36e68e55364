"""Where the lines and bars of a run stand: time goes to the right, branches grow to both sides of what they left.

Plain geometry in pixels; knows nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from niwaki.lang.tree import Chosen, Forked, Generated, Limb, Tree

WIDTH = 1120.0
LEFT, RIGHT, TOP, BOTTOM = 30.0, 34.0, 34.0, 12.0
BEND = 16.0  # how far before a fork, and behind a join, its curve begins and ends
TALLEST_LANE, LOWEST_LANE, WANTED_HEIGHT = 30.0, 0.6, 520.0
CHARACTER = 6.6  # pixels of a label's character, at most


@dataclass(frozen=True, slots=True)
class Path:
    """A line: `kind` is "wood", or "wait" while a finished branch is not joined yet."""

    kind: str
    d: str
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    call: Generated | Chosen
    kind: str
    x: float
    y: float
    width: float
    height: float
    round: float
    label: str


@dataclass(frozen=True, slots=True)
class Bud:
    """The end of a branch that nobody took home."""

    kind: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`trunk` is the height at which the trunk stands."""

    width: float
    height: float
    trunk: float
    paths: tuple[Path, ...]
    bars: tuple[Bar, ...]
    buds: tuple[Bud, ...]
    ticks: tuple[Tick, ...]


def chart_of(tree: Tree) -> Chart:
    layout = _grow(tree.trunk)
    num_lanes = layout.up + layout.down + 1
    lane = min(TALLEST_LANE, max(LOWEST_LANE, WANTED_HEIGHT / num_lanes))
    trunk = TOP + (layout.up + 0.5) * lane
    drawing = _Drawing(max(tree.seconds, 1e-6), lane)
    drawing.limb(layout, trunk, 0)
    height = TOP + num_lanes * lane + BOTTOM
    return Chart(
        WIDTH,
        height,
        trunk,
        tuple(drawing.paths),
        tuple(drawing.bars),
        tuple(drawing.buds),
        tuple(_ticks(tree.seconds)),
    )


@dataclass(slots=True)
class _Layout:
    """A limb with the lanes that its branches need above and below it."""

    limb: Limb
    up: int = 0
    down: int = 0
    branches: list[tuple[_Layout, int, float]] = field(default_factory=list)  # the branch, its offset, when it left
    end: float = 0.0


def _grow(limb: Limb) -> _Layout:
    layout = _Layout(limb, end=max(limb.start or 0.0, limb.end or 0.0, limb.joined or 0.0))
    taken: list[tuple[float, int, int]] = []  # forks so far: until when, and how many lanes on either side
    for item in limb.items:
        if not isinstance(item, Forked):
            continue
        grown = [_grow(child) for child in item.limbs]
        # A fork may use the lanes of those that ended before it; round those that still grow it goes outside.
        still = [(up, down) for end, up, down in taken if end > item.at]
        up, down = max((up for up, _ in still), default=0), max((down for _, down in still), default=0)
        heights = [branch.up + branch.down + 1 for branch in grown]
        split = _balanced(heights)
        for branch in reversed(grown[:split]):
            layout.branches.append((branch, -(up + branch.down + 1), item.at))
            up += branch.up + branch.down + 1
        for branch in grown[split:]:
            layout.branches.append((branch, down + branch.up + 1, item.at))
            down += branch.up + branch.down + 1
        end = max((branch.end for branch in grown), default=item.at)
        taken.append((end, up, down))
        layout.up, layout.down = max(layout.up, up), max(layout.down, down)
        layout.end = max(layout.end, end)
    return layout


def _balanced(heights: Sequence[int]) -> int:
    """How many of them go above, so that both sides are about as high."""
    total, above = sum(heights), 0
    for index, height in enumerate(heights):
        if 2 * above + height >= total:
            return index
        above += height
    return len(heights)


class _Drawing:
    """Collects lines and bars."""

    def __init__(self, seconds: float, lane: float) -> None:
        self.paths: list[Path] = []
        self.bars: list[Bar] = []
        self.buds: list[Bud] = []
        self._scale = (WIDTH - LEFT - RIGHT) / seconds
        self._lane = lane

    def limb(self, layout: _Layout, y: float, depth: int) -> None:
        limb = layout.limb
        width = max(min(1.0, self._lane / 4), min(self._lane / 3, 6.0) * 0.62**depth)
        start = self._x(limb.start or 0.0)
        end = max(self._x(limb.end if limb.end is not None else limb.start or 0.0), start)
        self.paths.append(Path("wood", f"M{start - (BEND if not depth else 0):.1f} {y:.1f}H{end:.1f}", width))
        for branch, offset, left_at in layout.branches:
            self._branch(branch, y, y + offset * self._lane, left_at, depth + 1)
        for item in limb.items:
            if isinstance(item, Generated | Chosen):
                self._bar(item, y, end)
        if limb.joined is None:
            kind = "failed" if limb.error is not None else "open" if not limb.is_done else ""
            self.buds.append(Bud(kind, end + 4, y, max(1.2, min(5.0, self._lane / 4))))

    def _branch(self, branch: _Layout, y_from: float, y: float, left_at: float, depth: int) -> None:
        width = max(min(1.0, self._lane / 4), min(self._lane / 3, 6.0) * 0.62**depth)
        x, half = self._x(left_at), BEND / 2
        start = self._x(branch.limb.start if branch.limb.start is not None else left_at)
        self.paths.append(
            Path(
                "wood",
                f"M{x - BEND:.1f} {y_from:.1f}C{x - half:.1f} {y_from:.1f} {x - half:.1f} {y:.1f} {x:.1f} {y:.1f}"
                f"H{start:.1f}",
                width,
            )
        )
        self.limb(branch, y, depth)
        joined = branch.limb.joined
        if joined is not None:
            end, back = self._x(branch.limb.end or left_at), self._x(joined)
            self.paths.append(
                Path(
                    "wait",
                    f"M{end:.1f} {y:.1f}H{back:.1f}C{back + half:.1f} {y:.1f} {back + half:.1f} {y_from:.1f} "
                    f"{back + BEND:.1f} {y_from:.1f}",
                    width,
                )
            )

    def _bar(self, call: Generated | Chosen, y: float, end: float) -> None:
        x = self._x(call.start)
        stop = self._x(call.start + call.seconds) if call.seconds is not None else max(end, x)
        width, height = max(2.5, stop - x - 1), max(min(1.6, self._lane * 0.9), self._lane * 0.62)
        name = call.name or ("gen" if isinstance(call, Generated) else "select")
        room = int((width - 12) / CHARACTER)
        label = name if len(name) <= room else name[: room - 1] + "…" if room >= 5 else ""
        kind = call.how if call.seconds is not None else "failed"
        self.bars.append(
            Bar(call, kind, x, y - height / 2, width, height, min(5.0, height / 3), label if self._lane >= 16 else "")
        )

    def _x(self, at: float) -> float:
        return LEFT + at * self._scale


def _ticks(seconds: float) -> Iterator[Tick]:
    """Round times, five to ten of them."""
    if seconds <= 0:
        yield Tick(LEFT, "0")
        return
    raw = seconds / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    unit, name = (1.0, "s") if step >= 0.1 else (1e-3, "ms") if step >= 1e-4 else (1e-6, "µs")
    for index in range(int(seconds / step + 1e-9) + 1):
        at = index * step
        label = "0" if index == 0 else f"{at / unit:,.10g} {name}"
        yield Tick(LEFT + at / seconds * (WIDTH - LEFT - RIGHT), label)
