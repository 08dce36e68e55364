"""The radix tree as one HTML file: prefixes from left to right, what they share drawn once, and every node in a table.

All text of the tree goes through `escape`: it may hold anything.
"""

# ruff: noqa: E501  # a rule of the style sheet reads best on one line

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from niwaki.runtime.pictures.picture import Picture, page_of
from niwaki.runtime.pictures.tree_view import TreeNode, TreeView

WIDTH = 1120.0
ROW = 26.0
GAP = 3.0
LEAST = 7.0  # width of a node of no tokens
LETTER = 7.0

STYLE: Final = """
i.held { background: var(--sampled) !important } i.tree { background: var(--wood) !important } i.free { background: var(--line) !important }
.chart { padding: 14px }
.node rect { fill: var(--line); stroke: var(--wood); stroke-width: 1.5 }
.node.locked rect { fill: var(--sampled-t); stroke: var(--sampled) } .node.pinned rect { fill: var(--cached-t); stroke: var(--cached) }
.node.lower rect { fill: none; stroke-dasharray: 4 3 }
.node:hover rect { stroke: var(--ink); stroke-opacity: 1 }
.node text { fill: var(--ink); font-size: 12px; pointer-events: none }
.beside { fill: var(--soft); font-size: 12px }
.twig { fill: none; stroke: var(--wood); stroke-width: 1.5; opacity: .5 }
.nodes { overflow-x: auto }
table { width: 100%; border-collapse: collapse; font-size: 13px; margin-top: 28px; font-variant-numeric: tabular-nums }
th { text-align: right; font-weight: 500; color: var(--soft); border-bottom: 1px solid var(--line); padding: 4px 8px; white-space: nowrap }
td { text-align: right; padding: 2px 8px; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; width: 100%; max-width: 0; overflow: hidden; text-overflow: ellipsis; padding-left: calc(8px + 16px * var(--depth, 0)) }
td:first-child { font: 12.5px/1.6 ui-monospace, "DejaVu Sans Mono", monospace }
td.locked { color: var(--sampled) } td.pinned { color: var(--cached) } td small { color: var(--soft) }
.note { color: var(--soft); font-size: 13px }
@media (max-width: 640px) { th:first-child, td:first-child { min-width: 17em } }
"""


def draw(view: TreeView) -> Picture:
    """The tree as a page that a notebook shows and `save` writes."""
    body = (
        f"<main><header><h1>The radix tree of {escape(view.model)}</h1>{_summary(view)}</header>"
        f'{_pool(view)}<div class="chart" tabindex="0" role="region" aria-label="The tree, from the first token on">'
        f"{_svg(view)}</div>"
        '<p class="note">A box is a run of tokens, as wide as it is long, the root at the left; what stands to the right '
        "of a box goes on from it. Behind the last box of a row stands what had no room in its boxes. The paler its "
        "edge, the longer ago it was used.</p>"
        f"{_table(view)}</main>"
    )
    return page_of(f"Radix tree of {view.model}", body, style=STYLE)


def _summary(view: TreeView) -> str:
    running, waiting = (int(view.usage.get(f"requests_{name}", 0)) for name in ("running", "waiting"))
    said = [f"{len(view.nodes):,} nodes", f"{view.num_tokens:,} tokens", f"{running} running, {waiting} waiting"]
    said += [f"{count:,} pages in {escape(tier)}" for tier, count in view.tiers.items()]
    lead = f"<p>{' · '.join(said)}</p>"
    if view.hit_rate is None:
        return lead
    return f'{lead}<p class="reuse"><b>{view.hit_rate:.0%}</b> of all prompt tokens were not computed again</p>'


def _pool(view: TreeView) -> str:
    pages = view.pages
    words = {"held": "pages that requests write to", "tree": "pages in the tree", "free": "free pages"}
    bar = "".join(f'<i class="{name}" style="flex:{count}"></i>' for name, count in pages.items() if count)
    rows = "".join(f'<li><i class="{name}"></i>{words[name]} <b>{count:,}</b></li>' for name, count in pages.items())
    return f'<div class="share" aria-hidden="true">{bar}</div><ul class="legend" aria-label="The pool">{rows}</ul>'


@dataclass(frozen=True, slots=True)
class _Box:
    index: int
    x: float
    width: float
    row: float  # of its middle


def _boxes(view: TreeView) -> list[_Box]:
    """A row for each leaf; a parent stands at the middle of its children. Widths fit the longest path."""
    places = list(view.places())
    depth = max((len(place.guides) for place in places), default=1)
    ends: dict[int | None, int] = {None: 0}  # of each node, in tokens
    for place in places:
        ends[place.index] = ends[place.node.parent] + place.node.num_tokens
    scale = max(0.0, WIDTH - depth * (LEAST + GAP)) / max(1, *ends.values())
    rows: dict[int, float] = {}
    below: dict[int | None, list[float]] = {}
    num_leaves = 0
    for place in reversed(places):  # children before parents
        own = below.get(place.index)
        if own is None:
            rows[place.index] = float(num_leaves)
            num_leaves += 1
        else:
            rows[place.index] = (min(own) + max(own)) / 2
        below.setdefault(place.node.parent, []).append(rows[place.index])
    boxes = []
    for place in places:
        x = scale * ends[place.node.parent] + (len(place.guides) - 1) * (LEAST + GAP)
        boxes.append(_Box(place.index, x, LEAST + scale * place.node.num_tokens, num_leaves - 1 - rows[place.index]))
    return boxes


def _svg(view: TreeView) -> str:
    boxes = _boxes(view)
    by_index = {box.index: box for box in boxes}
    oldest = max((node.age for node in view.nodes), default=0)
    drawn = []
    for box in boxes:
        node = view.nodes[box.index]
        parent = None if node.parent is None else by_index[node.parent]
        if parent is not None:
            x, y = parent.x + parent.width, (parent.row + 0.5) * ROW
            drawn.append(f'<path class="twig" d="M{x:.1f} {y:.1f}L{box.x:.1f} {(box.row + 0.5) * ROW:.1f}"/>')
    for box in boxes:
        drawn.append(_drawn(view.nodes[box.index], box, oldest))
    drawn += _beside(view, boxes)
    height = ROW * (1 + max((box.row for box in boxes), default=0))
    said = f"{len(boxes):,} nodes" if boxes else "nothing is cached yet"
    return (
        f'<svg viewBox="-1 -1 {WIDTH + 2:.0f} {height + 2:.0f}" role="img" aria-label="{said}">{"".join(drawn)}</svg>'
    )


def _beside(view: TreeView, boxes: list[_Box]) -> Iterator[str]:
    """Behind each leaf the text of the boxes of its row that are too narrow for their own, where there is room."""
    by_row: dict[float, list[_Box]] = {}
    for box in boxes:  # parents first, so the last one of a row is its leaf, or stands between rows
        by_row.setdefault(box.row, []).append(box)
    parents = {node.parent for node in view.nodes}
    for row in by_row.values():
        last = row[-1]
        told = "".join(_text(view.nodes[box.index]) for box in row if not _label(view.nodes[box.index], box))
        x = last.x + last.width + 6
        label = _fitting(told, int((WIDTH - x) / LETTER))
        if last.index not in parents and label:
            yield f'<text class="beside" x="{x:.1f}" y="{last.row * ROW + ROW / 2 + 4:.1f}">{escape(label)}</text>'


def _label(node: TreeNode, box: _Box) -> str:
    """What stands in the box."""
    return _fitting(_text(node), int((box.width - 12) / LETTER))


def _fitting(text: str, room: int) -> str:
    """As much of it as has room; nothing where that says nothing."""
    return "" if room < 3 else text if len(text) <= room else text[: room - 1] + "…"


def _text(node: TreeNode) -> str:
    return node.text.replace("\n", "⏎") + ("…" if node.is_cut else "")


def _drawn(node: TreeNode, box: _Box, oldest: int) -> str:
    fade = 1.0 - 0.8 * math.log1p(node.age) / math.log1p(oldest) if oldest else 1.0
    kind = node.state if node.tier == "pool" else "lower"
    return (
        f'<g class="node {kind}"><title>{escape(_facts(node))}</title>'
        f'<rect x="{box.x:.1f}" y="{box.row * ROW + 2:.1f}" width="{box.width:.1f}" height="{ROW - 4:.0f}" rx="4" '
        f'stroke-opacity="{fade:.2f}"/>'
        f'<text x="{box.x + 6:.1f}" y="{box.row * ROW + ROW / 2 + 4:.1f}">{escape(_label(node, box))}</text></g>'
    )


def _facts(node: TreeNode) -> str:
    return (
        f"{node.text}{'…' if node.is_cut else ''}\n{node.num_tokens:,} tokens on {node.num_pages:,} pages in {node.tier}, "
        f"{node.state}, {node.hits:,} hits, {node.num_locks:,} locks, age {node.age:,}"
    )


def _table(view: TreeView) -> str:
    heads = "".join(
        f"<th>{name}</th>" for name in ("prefix", "tokens", "pages", "hits", "locks", "age", "state", "tier")
    )
    rows = []
    for place in view.places():
        node = place.node
        text = escape(_text(node))
        if place.num_left_out:
            text += f" <small>+{place.num_left_out:,} children</small>"
        numbers = (node.num_tokens, node.num_pages, node.hits, node.num_locks, node.age)
        rows.append(
            f'<tr><td style="--depth:{len(place.guides) - 1}">{text}</td>'
            + "".join(f"<td>{number:,}</td>" for number in numbers)
            + f'<td class="{node.state}">{node.state}</td><td>{escape(node.tier)}</td></tr>'
        )
    return f'<div class="nodes"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
