"""The static graph of a program: its body run once over placeholders, with no backend, and only where that is safe.

The source is looked at first. A body that does nothing but append, fork, join and compute on plain data may run; one
that calls anything else is refused, since its effects would happen here and again in the run.
"""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Self, TypeAlias, cast

from niwaki.lang.executor import Executor
from niwaki.lang.history import History
from niwaki.lang.nodes import Gen, RoleBegin, RoleEnd, Select, Text
from niwaki.lang.origin import Origin, here
from niwaki.lang.run import Run
from niwaki.lang.state import State
from niwaki.lang.steps import Join, Snapshot, Step
from niwaki.runtime.api import Pending, ProgramError, SamplingOptions

MAX_STEPS = 10_000  # of one trace: a loop that ends only by what the model says has no end here
MAX_SHOWN_CHARS = 60

SAFE_BUILTINS = frozenset(
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance len list map max min ord chr range "
    "repr reversed round set sorted str sum tuple zip True False None Exception ValueError KeyError".split()
)
SAFE_MODULES = frozenset({"niwaki", "itertools", "json", "math", "re", "string", "textwrap"})
SAFE_NAMES_OF = ("niwaki.lang.expressions", "niwaki.runtime.choices")
PLAIN = (str, int, float, bool, bytes, type(None))


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


@dataclass(frozen=True, slots=True)
class Graph:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a program will do, whatever the model says. `print` it.

    `shared` is the text before the first argument and the first call, which all runs have in common (template text
    not counted). `stopped` says where the graph ends early, because the rest depends on a value that only a run has.
    """

    program: str
    graph: Graph
    shared: str
    stopped: str | None

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
    _Effects(name).check(func)
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Placeholder) and not is_plain(value):
            raise ProgramError(
                f"program {name} cannot be traced with {type(value).__name__} as an argument: what its methods do is "
                "not known; leave that argument out"
            )
    run = Run(name, SamplingOptions())
    tracer = _Tracer(run, _Budget(MAX_STEPS))
    stopped: str | None = None
    try:
        func(State(cast("Executor", tracer)), *copy.deepcopy(tuple(args)), **copy.deepcopy(dict(kwargs)))
    except _Stop as stop:
        stopped = stop.why
    except ProgramError as error:
        if _OPEN not in str(error):
            raise
        stopped = f"an argument that was not given: {str(error).replace(_OPEN, '{').replace(_CLOSE, '}')}"
    graph = tracer.graph()
    return Trace(shown, graph, _shared(graph), stopped)


def is_free_of_effects(func: Callable[..., object]) -> bool:
    """Does the body do nothing but append, fork, join and compute on plain data? Its source is looked at only."""
    try:
        _Effects(func.__name__).check(func)
    except ProgramError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------
# What stands in for values that only a run has
# ---------------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "\ue002", "\ue003"  # of Unicode's private use area: no author's text holds them


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
    parts: list[Part | tuple[_Tracer, ...]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
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
            match step:
                case Text(text=text):
                    self.parts.append(Line(str.__str__(text), self.role))
                case Gen(name=name, type=type_):
                    kind = "" if type_ is None else f": {type_.name}"
                    self._call(name, f"gen {name or ''}{kind}".strip())
                case Select(name=name, choices=choices):
                    self._call(name, f"select {name or ''} of {len(choices)}")
                case RoleBegin(role=role):
                    self.role = role
                case RoleEnd():
                    self.role = None
                case Join(appends=appends):
                    self.parts.append(Home(appends))
                case _:
                    pass  # variables and scopes change no text
        return True

    def _call(self, name: str | None, text: str) -> None:
        self.parts.append(Line(text, self.role, calls=True))
        if name is not None:
            self.known.add(name)

    def fork(self, count: int, origin: Origin) -> tuple[_Tracer, ...]:
        self.budget.spend(count)
        children = tuple(_Tracer(self.run, self.budget, self.role, known=set(self.known)) for _ in range(count))
        self.parts.append(children)
        return children

    def mark(self, origin: Origin) -> Pending[Snapshot]:
        return Pending()

    def sync(self, *, outside: bool = False) -> None:
        """Waiting changes nothing."""

    def variable(self, name: str, *, outside: bool = False) -> NoReturn:
        raise _Stop(f"the value of {name!r} ({here()})")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Stop(f"what the run has done so far ({here()})")


# ---------------------------------------------------------------------------------------------------------------
# Is it safe to run the body?
# ---------------------------------------------------------------------------------------------------------------

_REFUSED: dict[type[ast.AST], str] = {
    ast.Import: "imports",
    ast.ImportFrom: "imports",
    ast.Global: "writes a global variable",
    ast.Nonlocal: "writes a variable of the function around it",
    ast.Await: "awaits",
    ast.AsyncFor: "awaits",
    ast.AsyncWith: "awaits",
    ast.Yield: "yields",
    ast.YieldFrom: "yields",
}


class _Effects:
    """Looks for anything in a function, and in the functions that it names, that might have an effect."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._seen: set[types.CodeType] = set()

    def check(self, func: Callable[..., object]) -> None:
        if not isinstance(func, types.FunctionType):
            self._refuse(f"{func!r} is no plain function")
        if func.__code__ in self._seen:
            return
        self._seen.add(func.__code__)
        defaults = (*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values())
        if not all(type(value) in PLAIN or (type(value) is tuple and is_plain(value)) for value in defaults):
            self._refuse("a default of its arguments lives outside and is no plain value", func, None)
        tree = self._parsed(func)
        own = {*func.__code__.co_varnames, *func.__code__.co_cellvars}
        bound = {name for node in ast.walk(tree) if (name := _bound_by(node)) is not None}
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in _body(tree):
            refused = _REFUSED.get(type(node))
            if refused is not None:
                self._refuse(f"it {refused}", func, node)
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self._refuse(f"it sets the attribute {node.attr!r} of something", func, node)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                self._refuse(f"it uses {node.attr}", func, node)
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node.id in own:
                continue
            found, value = _lookup(func, node.id)
            if found:
                self._check_value(func, node, value, parents)
            elif node.id not in bound:
                self._refuse(f"{node.id} is not defined", func, node)

    def _check_value(self, func: types.FunctionType, node: ast.Name, value: object, parents: _Parents) -> None:
        name, parent = node.id, parents.get(node)
        if isinstance(value, types.ModuleType):
            module = value.__name__
            if module not in SAFE_MODULES or not isinstance(parent, ast.Attribute):
                self._refuse(f"it uses the module {module}", func, node)
            if module == "niwaki" and not _is_of_the_language(getattr(value, parent.attr, None)):
                self._refuse(f"it uses niwaki.{parent.attr}", func, node)
        elif getattr(builtins, name, node) is value:
            if name not in SAFE_BUILTINS:
                self._refuse(f"it uses {name}", func, node)
        elif _is_of_the_language(value):
            pass
        elif isinstance(value, types.FunctionType):
            self.check(value)
        elif isinstance(value, type):
            # As a dtype it is only looked at; called, its author's code would run.
            is_named = isinstance(parent, ast.Attribute) and not issubclass(value, enum.Enum)
            if is_named or (isinstance(parent, ast.Call) and parent.func is node):
                self._refuse(f"it uses {name}, whose methods may do anything", func, node)
        elif not is_plain(value) and not isinstance(value, re.Pattern):
            self._refuse(f"it uses {name}, a {type(value).__name__} from outside", func, node)
        elif isinstance(value, list | dict | set) and not _only_reads(node, parent):
            self._refuse(f"it may change {name}, which lives outside", func, node)

    def _parsed(self, func: types.FunctionType) -> ast.FunctionDef:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(func)))
        except (OSError, SyntaxError, TypeError):
            self._refuse(f"the source of {func.__name__} is not there to be looked at")
        if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
            self._refuse(f"{func.__name__} is no plain def")
        return tree.body[0]

    def _refuse(self, why: str, func: types.FunctionType | None = None, node: ast.AST | None = None) -> NoReturn:
        line = ""
        if func is not None and node is not None:
            line = f" ({Origin(func.__code__.co_filename, _line_of(func, node))})"
        raise ProgramError(f"program {self._program} was not traced, since its body may have effects: {why}{line}")


_Parents: TypeAlias = Mapping[ast.AST, ast.AST]


def _bound_by(node: ast.AST) -> str | None:
    """The local name that it sets, in whatever scope."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
            return name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return name
        case _:
            return None


def _body(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """Everything that a call runs: no annotations, defaults or decorators, which have run already."""
    for statement in tree.body:
        yield from ast.walk(statement)


def _line_of(func: types.FunctionType, node: ast.AST) -> int:
    return func.__code__.co_firstlineno + cast("int", getattr(node, "lineno", 1)) - 1


def _lookup(func: types.FunctionType, name: str) -> tuple[bool, object]:
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    if name in cells:
        try:
            return True, cells[name].cell_contents
        except ValueError:  # not set yet
            return False, None
    if name in func.__globals__:
        return True, func.__globals__[name]
    return hasattr(builtins, name), getattr(builtins, name, None)


def _is_of_the_language(value: object) -> bool:
    """A function that makes nodes, or a way to choose."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return module in SAFE_NAMES_OF or (isinstance(value, type) and module == "niwaki.runtime.api")


def is_plain(value: object) -> bool:
    """Data of Python's own types, all the way down: no method of it is somebody's code."""
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(item) for item in cast("Sequence[object]", value))
    if type(value) is dict:
        return all(is_plain(item) for pair in value.items() for item in pair)
    return type(value) in PLAIN


def _only_reads(node: ast.Name, parent: ast.AST | None) -> bool:
    match parent:
        case ast.For(iter=read) | ast.comprehension(iter=read):
            return read is node
        case ast.Subscript(value=read, ctx=ast.Load()):
            return read is node
        case ast.Call(func=called):
            return called is not node
        case ast.keyword():
            return True
        case _:
            return False


# ---------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------


def _shared(graph: Graph) -> str:
    texts = []
    for part in graph.parts:
        if not isinstance(part, Line) or part.calls:
            break
        texts.append(part.text)
        if _OPEN in part.text:
            break
    return "".join(texts).partition(_OPEN)[0]


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
