"""Whether a body does nothing but append, fork, join and compute on plain data: told from its source alone."""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias, cast

from niwaki.lang.origin import Origin
from niwaki.runtime.api import ProgramError

SAFE_BUILTINS = frozenset(
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance len list map max min ord chr range "
    "repr reversed round set sorted str sum tuple zip True False None Exception ValueError KeyError".split()
)
SAFE_MODULES = frozenset({"niwaki", "itertools", "json", "math", "re", "string", "textwrap"})
SAFE_NAMES_OF = ("niwaki.lang.expressions", "niwaki.runtime.api.choices")
PLAIN = (str, int, float, bool, bytes, type(None))


class Part:
    """What a state may be handed to, and goes on with it: a program. `bound` are defaults for its arguments."""

    def __init__(self, func: Callable[..., object], bound: Mapping[str, object]) -> None:
        self.func = func
        self.bound = bound


def is_free_of_effects(func: Callable[..., object]) -> bool:
    """Does the body do nothing but append, fork, join and compute on plain data? Its source is looked at only."""
    try:
        check_free_of_effects(func, func.__name__)
    except ProgramError:
        return False
    return True


def check_free_of_effects(func: Callable[..., object], program: str) -> bool:
    """Whether the body has a branch, or looks at what it is given, so that not every run need do the same.

    Raises:
        ProgramError: it may have effects beyond its state, or cannot be looked at.
    """
    effects = _Effects(program)
    effects.check(func)
    return effects.has_branch


def is_plain(value: object) -> bool:
    """Data of Python's own types, all the way down: no method of it is somebody's code."""
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(item) for item in cast("Sequence[object]", value))
    if type(value) is dict:
        return all(is_plain(item) for pair in value.items() for item in pair)
    return type(value) in PLAIN


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
_BRANCHES = ast.If, ast.IfExp, ast.While, ast.Match, ast.Try, ast.BoolOp, ast.Is, ast.IsNot


class _Effects:
    """Looks for anything in a function, and in the functions that it names, that might have an effect."""

    def __init__(self, program: str) -> None:
        self._program = program
        # By function, not by code: two that a factory made name different ones. And whether as a part.
        self._seen: set[tuple[types.FunctionType, bool]] = set()
        self.has_branch = False

    def check(self, func: Callable[..., object], *, is_part: bool = False) -> None:
        if not isinstance(func, types.FunctionType):
            self._refuse(f"{func!r} is no plain function")
        if (func, is_part) in self._seen:
            return
        has_state = is_part or not self._seen
        self._seen.add((func, is_part))
        defaults = (*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values())
        if not all(type(value) in PLAIN or (type(value) is tuple and is_plain(value)) for value in defaults):
            self._refuse("a default of its arguments lives outside and is no plain value", func, None)
        tree = self._parsed(func)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        names = _Names(tree, parents, has_state=has_state)
        own = {*func.__code__.co_varnames, *func.__code__.co_cellvars}
        bound = {name for node in ast.walk(tree) if (name := _bound_by(node)) is not None}
        for node in _body(tree):
            self.has_branch |= isinstance(node, _BRANCHES) or bool(getattr(node, "ifs", ()))
            if isinstance(node, ast.Name) and node.id in names.arguments and isinstance(node.ctx, ast.Load):
                self.has_branch |= not self._only_says(func, node, names)
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
                self._check_value(func, node, value, names)
            elif node.id not in bound:
                self._refuse(f"{node.id} is not defined", func, node)

    def _check_value(self, func: types.FunctionType, node: ast.Name, value: object, names: _Names) -> None:
        name, parents = node.id, names.parents
        parent = parents.get(node)
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
        elif isinstance(value, Part):
            if not names.goes_on(node, parent) or not all(map(is_plain, value.bound.values())):
                self._refuse(f"it runs the program {name}, which is no part of it: {name}(state, ...)", func, node)
            self.check(value.func, is_part=True)
        elif isinstance(value, type) or _is_of_typing(value):
            # As a dtype it is only looked at; called, its author's code would run.
            is_enum = isinstance(value, type) and issubclass(value, enum.Enum)
            is_named = isinstance(parent, ast.Attribute) and not is_enum
            is_lent = _is_lent(func, node, parents) and not is_enum
            if is_named or is_lent or (isinstance(parent, ast.Call) and parent.func is node):
                self._refuse(f"it uses {name}, whose methods may do anything", func, node)
        elif not is_plain(value) and not isinstance(value, re.Pattern):
            self._refuse(f"it uses {name}, a {type(value).__name__} from outside", func, node)
        elif isinstance(value, list | dict | set) and not _only_reads(node, parent):
            self._refuse(f"it may change {name}, which lives outside", func, node)

    def _only_says(
        self, func: types.FunctionType, node: ast.AST, names: _Names, seen: frozenset[str] = frozenset()
    ) -> bool:
        """Whether a body only says what a name stands for: an argument, or what it makes of some. What is read of it
        may be another thing in each run, such as the key of a look-up, and a trace would not notice where it is
        Python's own text. `seen` are the names that are looked at already."""
        parent = names.parents[node]
        while True:
            if names.asks_an_argument(node, parent):
                above = names.parents[parent]
                if not isinstance(getattr(parent, "ctx", None), ast.Load):
                    return True  # a variable of a state
                if isinstance(above, ast.Call) and above.func is parent:
                    return True  # a method of a state; of any other argument it ends the trace
            elif not (
                _carries(parent) or self._is_said_by(func, node, parent) or self._is_handed_on(func, node, names)
            ):
                break
            node, parent = parent, names.parents[parent]
        match parent:
            case ast.Expr():
                return True
            case ast.AugAssign(target=to) | ast.Assign(targets=[ast.Subscript() as to]) if names.is_state(to):
                return True
            case ast.AugAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                return name in seen or all(
                    self._only_says(func, read, names, seen | {name}) for read in names.reads_of(name)
                )
            case _:
                return False

    def _is_handed_on(self, func: types.FunctionType, node: ast.AST, names: _Names) -> bool:
        """Whether it is an argument, as it was given, of a function of the author's, which is looked at itself."""
        match names.parents[node]:
            case ast.Call(func=ast.Name(id=name) as called, args=args, keywords=[]) if called is not node:
                is_theirs = isinstance(_lookup(func, name)[1], types.FunctionType | Part)
                return is_theirs and all(isinstance(arg, ast.Constant) or names.is_as_given(arg) for arg in args)
            case _:
                return False

    def _is_said_by(self, func: types.FunctionType, node: ast.AST, call: ast.AST) -> bool:
        """Whether it is an argument of a function of the language."""
        match call:
            case ast.Call(func=ast.Name(id=name) as called) if called is not node:
                found, value = _lookup(func, name)
                return found and _is_of_the_language(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr) as called) if called is not node:
                found, value = _lookup(func, name)
                return found and isinstance(value, types.ModuleType) and _is_of_the_language(getattr(value, attr, None))
            case _:
                return False

    def _parsed(self, func: types.FunctionType) -> ast.FunctionDef:
        try:
            # Of the code: the source of a function that says what it wraps would be that of the wrapped one.
            tree = ast.parse(textwrap.dedent(inspect.getsource(func.__code__)))
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


def _makes_text(node: ast.AST) -> bool:
    """Text of other values: an f-string, `%`, a sum with text, `format`, `join`, `str` and `repr`."""
    match node:
        case ast.JoinedStr(values=values):
            return any(isinstance(value, ast.FormattedValue) for value in values)
        case ast.FormattedValue():
            return True
        case ast.BinOp(left=left, op=ast.Mod()):
            return _is_text(left)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return any(_is_text(side) or _makes_text(side) for side in (left, right))
        case ast.Call(func=ast.Attribute(attr="format" | "format_map" | "join")):
            return True
        case ast.Call(func=ast.Name(id="str" | "repr")):
            return True
        case _:
            return False


def _carries(node: ast.AST) -> bool:
    """Whether it holds or hands on what stands in it, and looks at nothing of it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return True
    return isinstance(node, ast.List | ast.Tuple | ast.Starred | ast.keyword | ast.Lambda) or _makes_text(node)


class _Names:
    """Who sets the names of a function, and what they may stand for while it is traced."""

    def __init__(self, tree: ast.FunctionDef, parents: _Parents, *, has_state: bool) -> None:
        self.parents = parents
        self.arguments = {one.arg for one in ast.walk(tree.args) if isinstance(one, ast.arg)}
        positional = [*tree.args.posonlyargs, *tree.args.args]
        self._state = positional[0].arg if has_state and positional else None
        self._names = [one for one in ast.walk(tree) if isinstance(one, ast.Name)]
        inner = [one for one in ast.walk(tree) if isinstance(one, ast.arguments) and one is not tree.args]
        # A name that an inner function has, too, may stand for anything.
        self._hidden = {one.arg for arguments in inner for one in ast.walk(arguments) if isinstance(one, ast.arg)}

    def reads_of(self, name: str) -> list[ast.Name]:
        return [one for one in self._names if one.id == name and isinstance(one.ctx, ast.Load)]

    def is_as_given(self, node: ast.AST) -> bool:
        """Whether it is an argument that nothing else was put in the place of; the program's state is appended to."""
        if not isinstance(node, ast.Name) or node.id not in self.arguments - self._hidden:
            return False
        setters = self._setters(node.id)
        return not setters or (node.id == self._state and all(isinstance(one, ast.AugAssign) for one in setters))

    def asks_an_argument(self, node: ast.AST, parent: ast.AST) -> bool:
        """Whether `parent` is an attribute or an item of an argument."""
        return isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is node and self.is_as_given(node)

    def is_state(self, node: ast.AST) -> bool:
        """Whether what is added to, or set in, is the state or forks: all that they are given is said."""
        match node:
            case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
                return (name == self._state or self._is_group(name)) and name not in self._hidden
            case _:
                return False

    def goes_on(self, node: ast.Name, parent: ast.AST | None) -> bool:
        """Whether a program is called with the state, or with one of its forks, which it goes on with."""
        match parent:
            case ast.Call(func=called, args=[ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) as first, *_]):
                if called is not node or name in self._hidden:
                    return False
                if isinstance(first, ast.Subscript):
                    return self._is_group(name) and not isinstance(first.slice, ast.Slice)
                return (name == self._state and self.is_as_given(first)) or self._is_of_group(name)
            case _:
                return False

    def _is_of_group(self, name: str) -> bool:
        """Whether only loops over forks, and appends, set it."""
        setters = [one for one in self._setters(name) if not isinstance(one, ast.AugAssign)]
        return bool(setters) and all(
            isinstance(one, ast.For | ast.comprehension)
            and isinstance(one.iter, ast.Name)
            and isinstance(one.target, ast.Name)
            and self._is_group(one.iter.id)
            for one in setters
        )

    def _is_group(self, name: str) -> bool:
        """Whether only `fork` and appends set it."""
        setters = [one for one in self._setters(name) if not isinstance(one, ast.AugAssign)]
        return bool(setters) and all(
            isinstance(one, ast.Assign)
            and isinstance(one.value, ast.Call)
            and isinstance(one.value.func, ast.Attribute)
            and one.value.func.attr == "fork"
            for one in setters
        )

    def _setters(self, name: str) -> list[ast.AST]:
        """The statements that set it."""
        setters = []
        for one in self._names:
            if one.id == name and not isinstance(one.ctx, ast.Load):
                setter = self.parents[one]
                while isinstance(setter, ast.Tuple | ast.List | ast.Starred):
                    setter = self.parents[setter]
                setters.append(setter)
        return setters


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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


def _is_lent(func: types.FunctionType, node: ast.AST, parents: _Parents) -> bool:
    """Whether it is given to somebody of Python's who may call it: `map`, `sorted`, `re.sub`."""
    call = parents.get(node)
    call = parents.get(call) if isinstance(call, ast.keyword) else call
    match call:
        case ast.Call(func=ast.Name(id=name)):
            found, value = _lookup(func, name)
            return found and value is not isinstance and getattr(builtins, name, None) is value
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            found, value = _lookup(func, name)
            return found and isinstance(value, types.ModuleType) and value.__name__ != "niwaki"
        case _:
            return False


def _is_of_the_language(value: object) -> bool:
    """A function that makes nodes, or a way to choose."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return module in SAFE_NAMES_OF or (isinstance(value, type) and module.startswith("niwaki.runtime.api."))


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


def _is_of_typing(value: object) -> bool:
    """`Literal`, `Optional[int]`, `list[int]`, `int | None`."""
    return type(value).__module__ == "typing" or isinstance(value, types.GenericAlias | types.UnionType)
