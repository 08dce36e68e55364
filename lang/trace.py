"""The static graph of a program: its body run once over placeholders, with no backend, and only where that is safe.

The source is looked at first. A body that does nothing but append, fork, join and compute on plain data may run; one
that calls anything else is refused, since its effects would happen here and again in the run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import NoReturn, Self, TypeAlias, cast

from niwaki.lang.effects import check_free_of_effects, is_plain
from niwaki.lang.executor import Executor
from niwaki.lang.history import History
from niwaki.lang.nodes import Gen, RoleBegin, RoleEnd, ScopeEnd, Select, SetVariable, Text
from niwaki.lang.origin import Origin, here
from niwaki.lang.run import Run
from niwaki.lang.state import State
from niwaki.lang.steps import Join, Snapshot, Step
from niwaki.runtime.api import Pending, ProgramError, SamplingOptions

MAX_STEPS = 10_000  # of one trace: a loop that ends only by what the model says has no end here
MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Line:
    """Text that the program writes, or a call. `calls` tells them apart; `text` is what stands in the picture."""

    text: str
    role: str | None
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Branches:
    """A fork: the graph of each branch."""

    graphs: tuple[Graph, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """A join."""

    appends: bool


Part: TypeAlias = Line | Branches | Home
Beginning: TypeAlias = Text | RoleBegin | RoleEnd


@dataclass(frozen=True, slots=True)
class Graph:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a program will do, whatever the model says. `print` it.

    `beginning` stands before the first argument and the first call: all runs have it in common. `stopped` says where
    the graph ends early, because the rest depends on a value that only a run has. `variables` has the Python type of
    each variable that every run ends with (`object`: not known); it is None where that is not known of all of them, or
    the body returns something else.
    """

    program: str
    graph: Graph
    beginning: tuple[Beginning, ...]
    stopped: str | None
    variables: Mapping[str, object] | None = None

    @property
    def shared(self) -> str:
        """The text of the beginning, without the template's."""
        return "".join(step.text for step in self.beginning if isinstance(step, Text))

    def __str__(self) -> str:
        lines = [self.program, *_drawn(self.graph, "")]
        if self.stopped is not None:
            lines.append(f"└ from here on it depends on {self.stopped}")
        lines.append(f"shared by all runs: {_shown(self.shared) if self.shared else 'nothing'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def trace(
    func: Callable[..., object], name: str, args: Sequence[object], kwargs: Mapping[str, object], shown: str
) -> Trace:
    """Run the body over the arguments, which may be placeholders.

    Raises:
        ProgramError: the body may have effects beyond its state, or cannot be looked at. It was not run.
        What the body raises.
    """
    has_branch = check_free_of_effects(func, name)
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Placeholder) and not is_plain(value):
            raise ProgramError(
                f"program {name} cannot be traced with {type(value).__name__} as an argument: what its methods do is "
                "not known; leave that argument out"
            )
    run = Run(name, SamplingOptions())
    tracer = _Tracer(run, _Budget(MAX_STEPS))
    stopped: str | None = None
    returned: object = None
    try:
        returned = func(State(cast("Executor", tracer)), *copy.deepcopy(tuple(args)), **copy.deepcopy(dict(kwargs)))
    except _Stop as stop:
        stopped = stop.why
    except ProgramError as error:
        if _OPEN not in str(error):
            raise
        stopped = f"an argument that was not given: {str(error).replace(_OPEN, '{').replace(_CLOSE, '}')}"
    # No placeholder stops `is None` or isinstance, and one in a name makes another name in each run.
    is_known = stopped is None and returned is None and not has_branch and not any(map(_is_open, tracer.variables))
    variables = tracer.variables if is_known else None
    return Trace(shown, tracer.graph(), tuple(tracer.beginning), stopped, variables)


# ---------------------------------------------------------------------------------------------------------------
# What stands in for values that only a run has
# ---------------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "\ue002", "\ue003"  # of Unicode's private use area: no author's text holds them


def _is_open(text: str) -> bool:
    return _OPEN in str.__str__(text)


class _Stop(BaseException):
    """The body asked for a value that only a run has. No `except Exception` of the author's catches it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Placeholder(str):
    """An argument that was not given: it can be written into the text, and every other use ends the trace."""

    __slots__ = ("what",)
    what: str

    def __new__(cls, what: str) -> Self:
        self = super().__new__(cls, f"{_OPEN}{what}{_CLOSE}")
        self.what = what
        return self

    def __deepcopy__(self, memo: object) -> Placeholder:
        return self

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return str.__str__(self)

    def __format__(self, spec: str) -> str:
        return str.__str__(self) if not spec else self._stop()

    def __bool__(self) -> bool:
        # The language asks whether there is text to append. Nobody else may know.
        asker = str(sys._getframe(1).f_globals.get("__name__"))
        return asker.startswith("niwaki.lang") or self._stop()

    def __add__(self, other: str) -> str:
        return str.__add__(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return str.__add__(other, self) if isinstance(other, str) else NotImplemented

    def __rmod__(self, other: str) -> str:
        return other % str.__str__(self) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: object) -> Placeholder:
        return Placeholder(f"{self.what}[{key!r}]")

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.what}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._stop()

    def _stop(self, *args: object, **kwargs: object) -> NoReturn:
        raise _Stop(f"the argument {self.what} ({here()})")


_ASKING = "len iter contains eq ne lt le gt ge hash mul rmul mod index int float"


def _close_placeholders() -> None:
    """Everything that text can do besides being written asks for its value."""
    asking = {name for name in dir(str) if not name.startswith("_")}
    asking |= {f"__{name}__" for name in _ASKING.split()}
    for name in asking:
        setattr(Placeholder, name, Placeholder._stop)


_close_placeholders()


# ---------------------------------------------------------------------------------------------------------------
# The state's executor while it is traced
# ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Budget:
    """Steps left, over all branches."""

    left: int

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _Stop(f"how often its loop turns: {MAX_STEPS:,} steps without an end")


@dataclass(eq=False, slots=True)
class _Tracer:
    """Notes the steps. Does for a `State` what an executor does, except that there are no values to read."""

    run: Run
    budget: _Budget
    role: str | None = None
    variables: dict[str, object] = field(default_factory=dict)  # their types, of those that were made here
    marked: dict[Pending[Snapshot], Mapping[str, object]] = field(default_factory=dict)  # of all branches
    parts: list[Part | tuple[_Tracer, ...]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    beginning: list[Beginning] = field(default_factory=list)
    is_beginning: bool = True
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.run.program)

    def graph(self) -> Graph:
        return Graph(
            tuple(
                Branches(tuple(branch.graph() for branch in part)) if isinstance(part, tuple) else part
                for part in self.parts
            )
        )

    def submit(self, steps: Sequence[Step], origin: Origin) -> bool:
        self.budget.spend(len(steps))
        for step in steps:
            self._begin(step)
            match step:
                case Text(text=text):
                    self.parts.append(Line(str.__str__(text), self.role))
                case Gen(name=name, type=type_):
                    kind = "" if type_ is None else f": {type_.name}"
                    self._call(name, f"gen {name or ''}{kind}".strip(), _type_of(step))
                case Select(name=name, choices=choices, gen=gen):
                    self._call(name, f"select {name or ''} of {len(choices)}", str if gen is None else _type_of(gen))
                case ScopeEnd(name=name):
                    self.variables[name] = str
                case SetVariable(name=name):
                    self.variables[name] = object
                case RoleBegin(role=role):
                    self.role = role
                case RoleEnd():
                    self.role = None
                case Join(marks=marks, appends=appends, keeps_errors=keeps_errors):
                    self.parts.append(Home(appends))
                    if not appends:
                        self._gather([self.marked[mark] for mark in marks], may_hold_errors=keeps_errors)
                case _:
                    pass  # the beginning of a scope changes no text
        return True

    def _begin(self, step: Step) -> None:
        """Note what all runs begin with."""
        if not self.is_beginning:
            return
        match step:
            case Text(text=text):
                known, mark, _ = str.__str__(text).partition(_OPEN)
                self.beginning.append(Text(known))
                self.is_beginning = not mark
            case RoleBegin() | RoleEnd():
                self.beginning.append(step)
            case Gen() | Select() | Join():
                self.is_beginning = False
            case _:
                pass

    def _call(self, name: str | None, text: str, kind: object) -> None:
        self.parts.append(Line(text, self.role, calls=True))
        if name is not None:
            self.known.add(name)
            self.variables[name] = kind

    def _gather(self, branches: Sequence[Mapping[str, object]], *, may_hold_errors: bool) -> None:
        for name in dict.fromkeys(name for variables in branches for name in variables):
            first = branches[0].get(name)
            is_in_all = all(name in variables and variables[name] == first for variables in branches)
            is_known = is_in_all and not may_hold_errors
            self.variables.setdefault(name, GenericAlias(list, (first if is_known else object,)))

    def fork(self, count: int, origin: Origin) -> tuple[_Tracer, ...]:
        self.budget.spend(count)
        self.is_beginning = False
        children = tuple(
            _Tracer(self.run, self.budget, self.role, marked=self.marked, known=set(self.known)) for _ in range(count)
        )
        self.parts.append(children)
        return children

    def mark(self, origin: Origin) -> Pending[Snapshot]:
        mark: Pending[Snapshot] = Pending()
        self.marked[mark] = dict(self.variables)
        return mark

    def submitted_names(self) -> tuple[str, ...]:
        return tuple(self.variables)

    def sync(self, *, outside: bool = False) -> None:
        """Waiting changes nothing."""

    def variable(self, name: str, *, outside: bool = False) -> NoReturn:
        raise _Stop(f"the value of {name!r} ({here()})")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Stop(f"what the run has done so far ({here()})")


def _type_of(gen: Gen) -> object:
    """The Python type of its value."""
    if gen.ask is not None or (gen.options.n or 1) > 1:
        return object
    if gen.dtype is not None:
        return gen.dtype
    return str if gen.type is None or gen.type.parse is str else object


# ---------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------


def _drawn(graph: Graph, indent: str) -> Iterator[str]:
    for part in graph.parts:
        match part:
            case Line(text=text, role=role, calls=calls):
                label = "" if role is None else f"{role}: "
                yield f"{indent}├ {label}{text if calls else _shown(text)}"
            case Home(appends=appends):
                yield f"{indent}├ join" + (", texts appended" if appends else "")
            case Branches(graphs=graphs):
                count = len(graphs)
                yield f"{indent}├ fork into {count}" + (", on one shared prefix" if count > 1 else "")
                start = 0
                while start < count:
                    stop = start + 1
                    while stop < count and graphs[stop] == graphs[start]:
                        stop += 1
                    label = f"{start}" if stop == start + 1 else f"{start} to {stop - 1}"
                    yield f"{indent}│ ├ {label}"
                    yield from _drawn(graphs[start], f"{indent}│ │ ")
                    start = stop


def _shown(text: str) -> str:
    if len(text) > MAX_SHOWN_CHARS:
        text = text[: MAX_SHOWN_CHARS // 2] + " … " + text[-MAX_SHOWN_CHARS // 3 :]
    # The marks go after the repr: a repr would write them as escapes.
    return repr(text).replace("\\ue002", "{").replace("\\ue003", "}")
