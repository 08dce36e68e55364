"""The radix tree in a terminal: one picture of it, or a live one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from niwaki.runtime.api import EngineStopped, TimedOut
from niwaki.runtime.pictures.tree_view import Place, TreeView

STYLES = {"locked": "green", "pinned": "blue", "idle": ""}
BAR = 24  # characters of the pool's bar
REFRESHES = 4  # a second
NUMBERS = 45  # characters of the columns beside the prefix, about


class Drawn:
    """A tree as rich draws it, with as many rows as the terminal has room for where `fits` is set."""

    def __init__(self, view: TreeView, *, fits: bool = False) -> None:
        self._view = view
        self._fits = fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        places = list(self._view.places())
        room = max(1, options.size.height - 6) if self._fits else len(places)
        # Two thirds of its column are for a node's text, however deep it stands.
        yield Group(_head(self._view), _table(places[:room], max(8, (options.max_width - NUMBERS) // 3)))
        if len(places) > room:
            yield Text(f"{len(places) - room} more nodes below", style="dim")


def show(view: TreeView) -> None:
    """Print it once."""
    Console().print(Drawn(view))


def watch(look: Callable[[], TreeView], seconds: float) -> None:
    """Draw what `look` gives, again every so many seconds, until Ctrl-C."""
    with Live(Drawn(look(), fits=True), auto_refresh=False, screen=Console().is_terminal) as live:
        try:
            while True:
                time.sleep(seconds)
                live.update(Drawn(look(), fits=True), refresh=True)
        except KeyboardInterrupt:
            return


@contextmanager
def watching(look: Callable[[], TreeView]) -> Iterator[None]:
    """Draw what `look` gives, again and again, while the block runs."""
    drawn = Drawn(look(), fits=True)

    def latest() -> Drawn:
        nonlocal drawn
        with suppress(TimedOut, EngineStopped):  # a step takes its time, or it is over: what was seen last stands
            drawn = Drawn(look(), fits=True)
        return drawn

    with Live(get_renderable=latest, refresh_per_second=REFRESHES):
        yield


def _head(view: TreeView) -> RenderableType:
    pages = view.pages
    total = max(1, sum(pages.values()))
    held, tree = (round(BAR * pages[name] / total) for name in ("held", "tree"))
    bar = Text.assemble(("█" * held, "green"), ("█" * tree, "yellow"), ("░" * (BAR - held - tree), "dim"))
    told = f"pages: {pages['held']:,} held, {pages['tree']:,} in the tree, {pages['free']:,} free"
    lines = [Text.assemble((view.model, "bold"), "  ", bar, "  ", told)]
    running, waiting = (int(view.usage.get(f"requests_{name}", 0)) for name in ("running", "waiting"))
    facts = [f"{running} running, {waiting} waiting"]
    if view.hit_rate is not None:
        facts.append(f"{view.hit_rate:.0%} of all prompt tokens were not computed again")
    facts += [f"{count:,} pages in {tier}" for tier, count in view.tiers.items()]
    lines.append(Text(" · ".join(facts)))
    return Group(*lines)


def _table(places: list[Place], guides_width: int) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("prefix", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "pages", "hits", "locks", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for row in places:
        node = row.node
        style = STYLES[node.state]
        text = Text(_guides(row.guides, guides_width), style="dim")
        text.append(_line(node.text) + ("…" if node.is_cut else ""), style=style)
        if row.num_left_out:
            text.append(f"  +{row.num_left_out:,} children", style="dim")
        numbers = (node.num_tokens, node.num_pages, node.hits, node.num_locks, node.age)
        table.add_row(text, *(f"{number:,}" for number in numbers), Text(node.state, style), node.tier)
    return table


def _guides(guides: tuple[bool, ...], width: int) -> str:
    """Those of the levels next to the node; where not all have room, how deep it stands in place of the others."""
    drawn = "".join("│ " if more else "  " for more in guides[:-1]) + ("├ " if guides[-1] else "└ ")
    if len(drawn) <= width:
        return drawn
    depth = f"{len(guides)}⋯"
    room = (width - len(depth)) // 2 * 2
    return depth.ljust(width - room) + drawn[-room:]


def _line(text: str) -> str:
    """On one line, without what could move a terminal's cursor."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character == "\n":
        return "⏎"
    return character if character.isprintable() else "·"
