"""A run's tree as one HTML file: the tree over time, and the text with its branches side by side.

Everything that is seen is in the markup; the page's script only adds to it (details under the pointer, keys). All text
of a run goes through `escape`: it may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Literal, TypeAlias

from niwaki.lang.chart import Chart, chart_of
from niwaki.lang.page import SCRIPT, STYLE
from niwaki.lang.tree import Chosen, Forked, Generated, How, Joined, Limb, Part, Prompt, Set, Totals, Tree
from niwaki.runtime.api import TokenLogprob
from niwaki.runtime.pictures.picture import Picture, page_of

OPEN_ITEMS = 200  # of a run: with more, the forks inside of forks start closed
SHOWN_LIMBS = 12  # of one fork; the rest opens on demand
LONG_TEXT = 900  # characters: longer pieces show their head and tail
MAX_TOKENS_IN_DETAILS = 80
MAX_CHOICES_IN_DETAILS = 12

Marks: TypeAlias = Sequence[tuple[int, int, Literal["forced", "drafted"]]]  # from which character to which, ascending
WORDS: dict[How, str] = {
    "cached": "from the cache",
    "prefilled": "computed",
    "mixed": "partly from the cache",
    "read": "read; the backend does not say how",
    "unread": "not read by the model",
    "sampled": "sampled",
    "forced": "forced by the constraint",
    "drafted": "guessed from earlier text, and right",
    "selected": "selected",
}
LEGEND: tuple[tuple[str, str], ...] = (
    ("cached", "prompt from the cache"),
    ("prefilled", "prompt computed"),
    ("sampled", "sampled"),
    ("forced", "forced by a constraint"),
    ("drafted", "drafted from earlier text"),
    ("selected", "selected"),
)


def picture_of(trees: Sequence[Tree]) -> Picture:
    """One page with a section for each tree, in order."""
    maker = _Maker()
    sections = "".join(maker.section(tree) for tree in trees)
    title = ", ".join(dict.fromkeys(tree.program for tree in trees)) or "no run"
    body = (
        f'<main>{sections}</main><div id="details" hidden>{"".join(maker.details)}</div>'
        '<div id="tip" role="tooltip" hidden></div>'
    )
    return page_of(title, body, style=STYLE, script=SCRIPT)


class _Maker:
    """Collects the details of all calls, so that names are unique on the page."""

    def __init__(self) -> None:
        self.details: list[str] = []
        self._is_large = False

    def section(self, tree: Tree) -> str:
        chart = chart_of(tree)
        self._is_large = sum(len(limb.items) for limb in tree.limbs()) > OPEN_ITEMS
        first = len(self.details)
        names = {id(call): f"n{first + index}" for index, call in enumerate(_calls(tree.trunk))}
        body = self._limb(tree.trunk, names, tree)
        return (
            f'<article class="run"><header><h1>{escape(tree.program)}</h1>{_summary(tree)}</header>'
            f"{_legend(tree.totals())}{_svg(chart, names)}"
            '<div class="tools" hidden><button type="button" data-open="1">open all</button>'
            '<button type="button" data-open="0">close all</button></div>'
            f'<div class="trunk">{body}</div></article>'
        )

    # -- the text -----------------------------------------------------------------------------------------------------

    def _limb(self, limb: Limb, names: dict[int, str], tree: Tree) -> str:
        blocks: list[str] = []
        for is_inline, group in groupby(limb.items, key=lambda item: not isinstance(item, Forked | Joined)):
            if is_inline:
                blocks += self._flow([item for item in group if not isinstance(item, Forked | Joined)], names)
            else:
                for item in group:
                    if isinstance(item, Forked):
                        blocks.append(self._fork(item, names, tree, len(limb.path)))
                    elif isinstance(item, Joined):
                        blocks.append(_join(item))
        if limb.error is not None:
            blocks.append(_error(limb.error))
        return "".join(blocks)

    def _flow(self, items: Iterable[Prompt | Generated | Chosen | Set], names: dict[int, str]) -> Iterator[str]:
        """Runs of text, one block for each turn."""
        pieces: list[tuple[str | None, str]] = []
        for item in items:
            match item:
                case Prompt():
                    pieces += zip((part.role for part in item.parts), _parts(item), strict=True)
                case Set():
                    value = _clipped(repr(item.value), 60)
                    pieces.append((None, f'<span class="set">{escape(item.name)} = {escape(value)}</span>'))
                case Generated() | Chosen():
                    pieces.append((item.role, self._call(item, names[id(item)])))
        for role, group in groupby(pieces, key=lambda piece: piece[0]):
            label = "" if role is None else f'<span class="role">{escape(role)}</span>'
            yield f'<div class="turn{" chat" if label else ""}">{label}<div class="flow">'
            yield "".join(piece for _, piece in group) + "</div></div>"

    def _call(self, call: Generated | Chosen, name: str) -> str:
        self.details.append(f'<div data-for="{name}">{_details(call)}</div>')
        kind = call.how if call.seconds is not None else "failed"
        tag = "" if call.name is None else f"<b>{escape(call.name)}</b>"
        marks = _marks(call) if isinstance(call, Generated) else ()
        text = _folded(call.text, marks) if call.text else "∅" if kind != "failed" else "did not end"
        return f'<span class="call {kind}" id="{name}" tabindex="0" role="button">{tag}{text}</span>'

    def _fork(self, fork: Forked, names: dict[int, str], tree: Tree, depth: int) -> str:
        limbs = [self._card(limb, names, tree) for limb in fork.limbs]
        shown, more = "".join(limbs[:SHOWN_LIMBS]), limbs[SHOWN_LIMBS:]
        if more:
            shown += (
                f'<details class="more"><summary>{len(more):,} more branches</summary>'
                f'<div class="limbs">{"".join(more)}</div></details>'
            )
        count = f"{len(limbs):,} branches" if len(limbs) > 1 else "1 branch"
        if fork.program is not None:
            count = f"calls {escape(fork.program)}"
        return (
            f'<details class="fork"{" open" if depth == 0 or not self._is_large else ""}><summary>{count}'
            f" <small>at {_seconds(fork.at)} · {escape(_clipped(fork.line, 70))}</small></summary>"
            f'<div class="limbs">{shown}</div></details>'
        )

    def _card(self, limb: Limb, names: dict[int, str], tree: Tree) -> str:
        body = self._limb(limb, names, tree)
        calls = list(_calls(limb))
        made = sum(call.tokens for call in calls)
        state = "failed" if limb.error is not None else "" if limb.is_done else "running"
        end = limb.end if limb.end is not None else limb.start
        took = "never began" if limb.start is None or end is None else _seconds(end - limb.start)
        title = ".".join(str(index) for index in limb.path)
        is_wide = any(isinstance(item, Forked) for item in limb.items)
        return (
            f'<section class="limb{" wide" if is_wide else ""} {state}"><h2>{title}'
            f"<small>{_plural(made, 'new token')} · {took}{' · ' + state if state else ''}</small></h2>"
            f"{_strip(limb, tree.seconds)}{body}</section>"
        )


def _calls(limb: Limb) -> Iterator[Generated | Chosen]:
    for item in limb.items:
        if isinstance(item, Generated | Chosen):
            yield item
        elif isinstance(item, Forked):
            for child in item.limbs:
                yield from _calls(child)


def _parts(prompt: Prompt) -> Iterator[str]:
    """Each part, coloured. The cache covers the first tokens, so about as much of the text from its start on."""
    share = prompt.cached / prompt.tokens if prompt.how == "mixed" and prompt.cached and prompt.tokens else 0.0
    length = max(1, len(prompt.text))
    said = WORDS[prompt.how]
    if prompt.how == "mixed":
        said = f"{prompt.cached:,} tokens from the cache, {prompt.prefilled:,} computed"
    elif prompt.tokens is not None:
        said = f"{prompt.tokens:,} tokens {said}"
    position = 0
    for part in prompt.parts:
        how: str = prompt.how
        style = ""
        if how == "mixed":
            cut = (share * length - position) / max(1, len(part.text))
            how = "cached" if cut >= 1 else "prefilled" if cut <= 0 else "mixed"
            style = f' style="--cut:{cut:.0%}"' if how == "mixed" else ""
        position += len(part.text)
        yield _part(part, how, style, said)


def _part(part: Part, how: str, style: str, said: str) -> str:
    if part.control:
        text = escape(part.text.strip("\n").replace("\n", "⏎"))
        return f'<span class="t control {how}"{style} title="template text, {said}">{text}</span>' if text else ""
    return f'<span class="t {how}"{style} title="{said}">{_folded(part.text)}</span>'


def _marks(call: Generated) -> Marks:
    forced: Marks = [(start, end, "forced") for start, end in call.forced_spans]
    drafted: Marks = [(start, end, "drafted") for start, end in call.drafted_spans]
    return sorted([*forced, *drafted])


def _folded(text: str, marks: Marks = (), at: int = 0) -> str:
    """The text, its middle folded away where it is long, and at the start of a block signs in place of line ends.

    `marks` count characters from where this text is at `at`.
    """
    body = text.lstrip("\n")
    if body != text and body:
        count = len(text) - len(body)
        breaks = f'<span class="sign">{"⏎" * count}</span><span class="break">{text[:count]}</span>'
        return breaks + _folded(body, marks, at + count)
    if len(text) <= LONG_TEXT:
        return _marked(text, marks, at)
    first, last = LONG_TEXT // 2, len(text) - LONG_TEXT // 4
    middle = _marked(text[first:last], marks, at + first)
    return (
        f'{_marked(text[:first], marks, at)}<details class="rest"><summary>{last - first:,} more characters</summary>'
        f"{middle}</details>{_marked(text[last:], marks, at + last)}"
    )


def _marked(text: str, marks: Marks, at: int) -> str:
    """Escaped, and marked where it was not sampled token by token."""
    made, done = "", 0
    for start, end, how in marks:
        first, last = max(start - at, done), min(end - at, len(text))
        if first < last:
            made += f'{escape(text[done:first])}<i class="{how}" title="{WORDS[how]}">{escape(text[first:last])}</i>'
            done = last
    return made + escape(text[done:])


def _join(join: Joined) -> str:
    what = ", ".join(escape(name) for name in join.names)
    said = f"{what} gathered" if what else "texts appended"
    return f'<p class="join">joined <small>at {_seconds(join.at)} · {said}</small></p>'


def _error(error: BaseException) -> str:
    notes = "".join(f"<small>{escape(str(note))}</small>" for note in getattr(error, "__notes__", ()))
    return f'<p class="error"><b>{escape(type(error).__name__)}</b> {escape(_clipped(str(error), 600))}{notes}</p>'


def _strip(limb: Limb, seconds: float) -> str:
    """Where in the run this branch's own calls were."""
    marks = "".join(
        f'<i class="{call.how}" style="left:{call.start / seconds:.2%};width:{call.seconds / seconds:.2%}"></i>'
        for call in limb.items
        if isinstance(call, Generated | Chosen) and call.seconds is not None and seconds > 0
    )
    return f'<div class="strip" aria-hidden="true">{marks}</div>'


# ---------------------------------------------------------------------------------------------------------------
# The head of the page, and the tree over time
# ---------------------------------------------------------------------------------------------------------------


def _summary(tree: Tree) -> str:
    totals = tree.totals()
    said = [_plural(totals.calls, "call"), _plural(totals.limbs - 1, "branch", "branches"), _seconds(tree.seconds)]
    lead = " · ".join(said)
    if not totals.prompt_tokens:
        return f"<p>{lead}</p>"
    share = totals.reused_tokens / totals.prompt_tokens
    return (
        f"<p>{lead}</p><p class='reuse'><b>{share:.0%}</b> of the {totals.prompt_tokens:,} prompt tokens that the calls"
        f" stand on were not computed again</p>"
    )


def _legend(totals: Totals) -> str:
    counts = {
        "cached": totals.cached,
        "prefilled": totals.prefilled,
        "sampled": totals.sampled,
        "forced": totals.forced,
        "drafted": totals.drafted,
        "selected": totals.selected,
    }
    bar = "".join(f'<i class="{how}" style="flex:{count}"></i>' for how, count in counts.items() if count)
    rows = "".join(
        f'<li><i class="{how}"></i>{words} <b>{counts[how]:,}</b></li>' for how, words in LEGEND if counts[how]
    )
    return (
        f'<div class="share" aria-hidden="true">{bar}</div>'
        f'<ul class="legend" aria-label="Tokens by how they came to be">{rows}</ul>'
    )


def _svg(chart: Chart, names: dict[int, str]) -> str:
    paths = "".join(f'<path class="{path.kind}" d="{path.d}" stroke-width="{path.width:g}"/>' for path in chart.paths)
    ticks = "".join(
        f'<g class="tick"><line x1="{tick.x:.1f}" x2="{tick.x:.1f}" y1="22" y2="{chart.height:.0f}"/>'
        f'<text x="{tick.x:.1f}" y="14">{tick.label}</text></g>'
        for tick in chart.ticks
    )
    bars = "".join(
        f'<a href="#{names[id(bar.call)]}" class="bar {bar.kind}" tabindex="-1">'
        f'<rect x="{bar.x:.1f}" y="{bar.y:.1f}" width="{bar.width:.1f}" height="{bar.height:.1f}" rx="{bar.round:g}"/>'
        + (
            f'<text x="{bar.x + 7:.1f}" y="{bar.y + bar.height / 2 + 4:.1f}">{escape(bar.label)}</text>'
            if bar.label
            else ""
        )
        + "</a>"
        for bar in chart.bars
    )
    buds = "".join(
        f'<circle class="bud {bud.kind}" cx="{bud.x:.1f}" cy="{bud.y:.1f}" r="{bud.radius:g}"/>' for bud in chart.buds
    )
    return (
        '<div class="chart" tabindex="0" role="region" aria-label="The tree over time" '
        f'data-middle="{chart.trunk:.0f}">'
        f'<svg viewBox="0 0 {chart.width:.0f} {chart.height:.0f}" role="img" '
        f'aria-label="Branches over time: {len(chart.bars):,} calls">{ticks}{paths}{bars}{buds}</svg></div>'
    )


# ---------------------------------------------------------------------------------------------------------------
# Details of a call
# ---------------------------------------------------------------------------------------------------------------


def _details(call: Generated | Chosen) -> str:
    rows: list[tuple[str, str]] = []
    if call.seconds is not None:
        rows.append(("time", f"{_seconds(call.seconds)}, from {_seconds(call.start)}"))
    if call.prompt_tokens is not None:
        said = f"{call.prompt_tokens:,} tokens"
        if call.cached_tokens is not None:
            cached = min(call.cached_tokens, call.prompt_tokens)
            said += f": {cached:,} cached, {call.prompt_tokens - cached:,} computed"
        rows.append(("prompt", said))
    extra = ""
    if isinstance(call, Generated):
        if call.seconds is not None:
            speed = f", {call.tokens / call.seconds:,.0f} a second" if call.seconds > 0 else ""
            forced = f", {call.forced:,} of them forced" if call.forced else ""
            drafted = f", {call.drafted:,} drafted" if call.drafted else ""
            rows.append(("new", f"{_plural(call.tokens, 'token')}{forced}{drafted}{speed}"))
        if call.finish_reason is not None:
            matched = "" if call.finish_reason.matched is None else f" at {call.finish_reason.matched!r}"
            rows.append(("ended by", call.finish_reason.type + matched + ("" if call.complete else ", not complete")))
        if call.type is not None:
            rows.append(("type", _clipped(call.type, 80)))
        if call.temperature is not None:
            rows.append(("temperature", f"{call.temperature:g}"))
        if call.logprob is not None:
            mean = call.logprob / max(1, len(call.logprobs))
            rows.append(("log-probability", f"{call.logprob:.2f}, {mean:.2f} a token"))
        extra = _tokens(call) + _others(call.others)
    else:
        extra = _choices(call)
    rows.append(("line", _clipped(call.line, 90)))
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    kind = "gen" if isinstance(call, Generated) else "select"
    return f"<h3>{escape(call.name or kind)} <small>{kind}</small></h3><dl>{listed}</dl>{extra}"


def _tokens(call: Generated) -> str:
    """The tokens, each as dark as it was likely, above how many a constraint allowed there."""
    counts = call.allowed or (None,) * len(call.logprobs)
    steps = list(zip(call.logprobs, counts, strict=True))
    shown = "".join(_token(one, allowed) for one, allowed in steps[:MAX_TOKENS_IN_DETAILS])
    more = len(steps) - MAX_TOKENS_IN_DETAILS
    kind = "tokens masked" if call.allowed else "tokens"
    return f'<p class="{kind}">{shown}{f" and {more:,} more" if more > 0 else ""}</p>' if shown else ""


def _token(one: TokenLogprob, allowed: int | None) -> str:
    likely = math.exp(one.logprob or 0.0)
    text = escape(one.text if one.text is not None else str(one.token_id))
    if allowed is None:
        return f'<span style="--p:{likely:.2f}" title="{likely:.1%}">{text}</span>'
    said = "no choice" if allowed == 1 else f"one of {allowed:,} allowed"
    only = ' class="only"' if allowed == 1 else ""
    return f'<span{only} style="--p:{likely:.2f}" title="{likely:.1%}, {said}">{text}<sub>{allowed:,}</sub></span>'


def _others(others: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(_clipped(text, 120))}</li>" for text in others)
    return f"<h4>the other samples</h4><ol>{listed}</ol>" if listed else ""


def _choices(call: Chosen) -> str:
    """Each choice by the mean log-probability of its tokens, as a bar relative to the likeliest."""
    means = [None if c.logprob is None else c.logprob / max(1, c.tokens) for c in call.choices]
    best = max((mean for mean in means if mean is not None), default=0.0)
    ranked = sorted(zip(call.choices, means, strict=True), key=lambda pair: -math.inf if pair[1] is None else pair[1])
    rows = "".join(
        f'<li class="{"chosen" if choice.text == call.text else ""}">'
        f'<i style="width:{0.0 if mean is None else math.exp(mean - best):.0%}"></i>'
        f"<span>{escape(_clipped(choice.text, 60))}</span><b>{'–' if mean is None else f'{mean:.2f}'}</b></li>"
        for choice, mean in reversed(ranked[-MAX_CHOICES_IN_DETAILS:])
    )
    more = len(ranked) - MAX_CHOICES_IN_DETAILS
    left = f"<p>and {more:,} less likely ones</p>" if more > 0 else ""
    return f'<ul class="choices" title="mean log-probability of the tokens">{rows}</ul>{left}' if rows else ""


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.2g} ms"


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
