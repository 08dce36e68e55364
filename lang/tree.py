"""A run as frozen data: a trunk, its branches, and how each piece of text came to be.

Made from histories after the fact. Knows no backend: what the runtime did not report stands here as None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, assert_never

from niwaki.lang.history import Assigned, Called, Failed, ForkedInto, History, JoinedFrom, Sent, Wrote
from niwaki.lang.meta import Selected
from niwaki.lang.nodes import Gen
from niwaki.runtime.api import FinishReason, Score, TokenLogprob

How: TypeAlias = Literal["cached", "prefilled", "mixed", "read", "unread", "sampled", "forced", "drafted", "selected"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of written text. `control`: it comes from the chat template."""

    text: str
    control: bool
    role: str | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text that was handed to the model in one go.

    The first `cached` of its `tokens` were in the cache when they were first read; the rest was computed. None: the
    backend did not say. `is_read` is False for text that no call came after: the model never saw it.
    """

    parts: tuple[Part, ...]
    tokens: int | None
    cached: int | None
    is_read: bool

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def prefilled(self) -> int | None:
        return None if self.tokens is None or self.cached is None else self.tokens - self.cached

    @property
    def how(self) -> How:
        if not self.is_read:
            return "unread"
        if self.tokens is None or self.cached is None:
            return "read"
        if self.cached == self.tokens:
            return "cached"
        return "mixed" if self.cached else "prefilled"


@dataclass(frozen=True, slots=True)
class Generated:
    """One `gen`. Times are in seconds, `start` since the run began; `seconds` None: it never ended.

    `prompt_tokens` is all that stood before it, of which `cached_tokens` were not computed again. Log-probabilities
    are there where the program asked for them. `others` are the further texts of n > 1. Of the `tokens`, `forced` were
    written without asking the model, since the constraint left no choice; in `text` they stand at `forced_spans`.
    Others were `drafted`: guessed, and found right in one step with those before them.
    `allowed`: beside log-probabilities, how many tokens a constraint let through at each.
    """

    name: str | None
    text: str
    role: str | None
    line: str
    start: float
    seconds: float | None
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    type: str | None
    temperature: float | None
    finish_reason: FinishReason | None
    complete: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    others: tuple[str, ...] = ()
    forced: int = 0
    forced_spans: tuple[tuple[int, int], ...] = ()
    drafted: int = 0
    drafted_spans: tuple[tuple[int, int], ...] = ()
    allowed: tuple[int | None, ...] = ()

    @property
    def how(self) -> How:
        return "sampled"

    @property
    def logprob(self) -> float | None:
        """Of the whole text; None where it was not asked for."""
        known = [token.logprob for token in self.logprobs if token.logprob is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts that a select compared, and the sum of its tokens' log-probabilities."""

    text: str
    tokens: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One `select`. `choices` is empty where it never ended."""

    name: str | None
    text: str
    role: str | None
    line: str
    start: float
    seconds: float | None
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    choices: tuple[Choice, ...] = ()

    @property
    def how(self) -> How:
        return "selected"


@dataclass(frozen=True, slots=True)
class Forked:
    """Limbs that begin here, side by side. `program`: the one limb is a run of that program, which was called here."""

    limbs: tuple[Limb, ...]
    line: str
    at: float
    program: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Forks came home. `names`: the variables that became lists; none where their texts were appended."""

    names: tuple[str, ...]
    line: str
    asked: float
    at: float


@dataclass(frozen=True, slots=True)
class Set:
    """The program set a variable."""

    name: str
    value: object


Item: TypeAlias = Prompt | Generated | Chosen | Forked | Joined | Set


@dataclass(frozen=True, slots=True)
class Limb:
    """What one state made: its items in order. Forks hang where they began. The root is the trunk.

    `path` is () for the trunk and (1, 0) for the first fork of its second. `variables` are those set on this limb.
    `start` None: it never began. `joined` None: nobody took it home.
    """

    path: tuple[int, ...]
    items: tuple[Item, ...]
    variables: Mapping[str, object]
    start: float | None
    end: float | None
    joined: float | None
    error: BaseException | None

    @property
    def text(self) -> str:
        """Of this limb alone: what it inherited stands on its parent."""
        return "".join(item.text for item in self.items if isinstance(item, Prompt | Generated | Chosen))

    @property
    def is_done(self) -> bool:
        """Did every call end?"""
        calls = (item for item in self.items if isinstance(item, Generated | Chosen))
        return all(call.seconds is not None for call in calls)

    def forks(self) -> Iterator[Limb]:
        for item in self.items:
            if isinstance(item, Forked):
                yield from item.limbs


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all limbs. Text that limbs share counts once, where it stands; choices that lost do not count."""

    limbs: int = 0
    calls: int = 0
    cached: int = 0
    prefilled: int = 0
    sampled: int = 0
    forced: int = 0
    drafted: int = 0
    selected: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """A run of `program`: its trunk, and how long it took in seconds."""

    program: str
    trunk: Limb
    seconds: float

    def limbs(self) -> Iterator[Limb]:
        """The trunk, and every branch after what it grew from."""
        waiting = [self.trunk]
        while waiting:
            limb = waiting.pop()
            yield limb
            waiting.extend(reversed(list(limb.forks())))

    def totals(self) -> Totals:
        """How many tokens came how. `reused_tokens` of the `prompt_tokens` of all calls were not computed again."""
        limbs = calls = cached = prefilled = sampled = forced = drafted = selected = prompt = reused = 0
        for limb in self.limbs():
            limbs += 1
            for item in limb.items:
                match item:
                    case Prompt():
                        cached += item.cached or 0
                        prefilled += item.prefilled or 0
                    case Generated():
                        sampled += item.tokens - item.forced - item.drafted
                        forced += item.forced
                        drafted += item.drafted
                    case Chosen():
                        selected += item.tokens
                    case _:
                        continue
                if isinstance(item, Generated | Chosen):
                    calls += 1
                    prompt += item.prompt_tokens or 0
                    reused += item.cached_tokens or 0
        return Totals(limbs, calls, cached, prefilled, sampled, forced, drafted, selected, prompt, reused)


# ---------------------------------------------------------------------------------------------------------------
# From histories
# ---------------------------------------------------------------------------------------------------------------


def tree_of(history: History) -> Tree:
    """The tree of the state whose history it is, as far as it has got."""
    began = history.started if history.started is not None else history.created
    trunk = _limb(history, (), began)
    tree = Tree(history.program, trunk, 0.0)
    ends = [end for limb in tree.limbs() for end in (limb.end, limb.joined) if end is not None]
    return Tree(history.program, trunk, max(ends, default=0.0))


def _limb(history: History, path: tuple[int, ...], began: float) -> Limb:
    items: list[Item] = []
    written: list[Part] = []
    variables: dict[str, object] = {}
    error: BaseException | None = None
    num_forks = 0
    reached = 0  # tokens of the branch that stand in items already
    events = tuple(history.events)
    for index, event in enumerate(events):
        match event:
            case Wrote(segment=segment, role=role):
                written.append(Part(segment.text, segment.control, role))
            case Sent(position=position, end=end):
                readers = _first_reads(events[index + 1 :])
                items.append(_prompt(written, position, end, reached, min(readers, default=None)))
                written, reached = [], end or 0
            case Called():
                if written:
                    items.append(_prompt(written, event.position, _end(event), reached, _cached(event)))
                    written = []
                made = _call(event, began)
                items.append(made)
                # A chosen text is sent with the next one; a generated one is on the branch already.
                reached = (_end(event) or 0) + (made.tokens if isinstance(made, Chosen) else 0)
                if made.name is not None and event.outcome is not None:
                    variables[made.name] = made.text
            case ForkedInto(histories=histories, origin=origin, at=at, program=program):
                limbs = [_limb(child, (*path, num_forks + number), began) for number, child in enumerate(histories)]
                num_forks += len(limbs)
                items.append(Forked(tuple(limbs), str(origin), at - began, program))
            case JoinedFrom(names=names, origin=origin, asked=asked, at=at):
                items.append(Joined(names, str(origin), asked - began, at - began))
            case Assigned(name=name, value=value):
                variables[name] = value
                items.append(Set(name, value))
            case Failed(error=failure):
                error = failure
            case _:
                assert_never(event)
    if written:
        items.append(Prompt(tuple(written), None, None, is_read=False))
    return Limb(
        path,
        tuple(items),
        MappingProxyType(variables),
        None if history.started is None else history.started - began,
        None if history.last is None else history.last - began,
        None if history.joined is None else history.joined - began,
        error,
    )


def _prompt(written: Sequence[Part], position: int | None, end: int | None, reached: int, cached: int | None) -> Prompt:
    """`position` and `end`: the branch's tokens before and after; `reached`: how many of them other items hold."""
    if position is None or end is None or (position == 0 and reached > 0):  # 0: all was sent again, on a new branch
        return Prompt(tuple(written), None, None, is_read=True)
    start = max(position, reached)
    tokens = max(0, end - start)
    return Prompt(tuple(written), tokens, None if cached is None else max(0, min(cached - start, tokens)), is_read=True)


def _first_reads(events: Sequence[object]) -> list[int]:
    """The cached tokens of the calls that first read what was handed over before `events`: here, or in forks."""
    found: list[int] = []
    for event in events:
        if isinstance(event, Called):
            cached = _cached(event)
            return found if cached is None else [*found, cached]
        if isinstance(event, ForkedInto) and event.program is None:
            found += [cached for child in event.histories for cached in _first_reads(tuple(child.events))]
    return found


def _end(call: Called) -> int | None:
    """The tokens of everything that stood before what the call made."""
    if call.outcome is None or isinstance(call.outcome, Selected):  # a score counts the choice as part of its prompt
        return call.end
    return call.outcome[0].prompt_tokens


def _cached(call: Called) -> int | None:
    match call.outcome:
        case None:
            return None
        case Selected(scores=scores):
            return min(score.cached_tokens for score in scores)
        case outputs:
            return min(output.cached_tokens for output in outputs)


def _call(call: Called, began: float) -> Generated | Chosen:
    start = call.started - began
    seconds = None if call.ended is None else call.ended - call.started
    node, line = call.node, str(call.origin)
    if isinstance(node, Gen):
        assert not isinstance(call.outcome, Selected), "a gen has outputs"
        outputs = call.outcome or ()
        first = outputs[0] if outputs else None
        return Generated(
            name=node.name,
            text="" if first is None else first.text,
            role=call.role,
            line=line,
            start=start,
            seconds=seconds,
            tokens=sum(output.completion_tokens for output in outputs),
            prompt_tokens=_end(call),
            cached_tokens=_cached(call),
            type=None if node.type is None else node.type.name,
            temperature=None if call.params is None else call.params.temperature,
            finish_reason=None if first is None else first.finish_reason,
            complete=first is not None and first.complete,
            logprobs=() if first is None else first.logprobs,
            top_logprobs=() if first is None else tuple(first.top_logprobs),
            others=tuple(output.text for output in outputs[1:]),
            forced=sum(len(output.forced) for output in outputs),
            forced_spans=() if first is None else first.forced_spans,
            drafted=sum(len(output.drafted) for output in outputs),
            drafted_spans=() if first is None else first.drafted_spans,
            allowed=() if first is None else first.allowed,
        )
    chosen = call.outcome if isinstance(call.outcome, Selected) else None
    score = None if chosen is None else chosen.scores[chosen.decision.index]
    return Chosen(
        name=node.name,
        text="" if chosen is None else chosen.choices[chosen.decision.index],
        role=call.role,
        line=line,
        start=start,
        seconds=seconds,
        tokens=0 if score is None else len(score.logprobs),
        prompt_tokens=_end(call),
        cached_tokens=_cached(call),
        choices=() if chosen is None else tuple(map(_choice, chosen.choices, chosen.scores)),
    )


def _choice(text: str, score: Score) -> Choice:
    known = [token.logprob for token in score.logprobs if token.logprob is not None]
    return Choice(text, len(score.logprobs), sum(known) if known else None)
