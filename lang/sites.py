"""Where a program's body reads a variable only to write it on: there the value need not be known while the body runs.

Looks at the source, never runs it. A read counts as written on when all that could happen to its value in Python is to
end up in what is appended to a state: `s += "So: " + s["x"]`. What cannot be seen to be so is read as usual.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Literal, TypeAlias, cast

Kind: TypeAlias = Literal["text", "list", "end"]
Position: TypeAlias = tuple[int | None, int | None, int | None, int | None]  # lines and columns, as code objects tell

TURNS = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class Sites:
    """Places in one file."""

    code: CodeType | None
    kinds: Mapping[Position, Kind]

    def kind_at(self, frame: FrameType) -> Kind | None:
        """Of the expression that the frame is at. A body that goes on with its state in a call of itself is not at its
        end where that call is."""
        code = frame.f_code
        if self.code is None or not self.kinds or code.co_filename != self.code.co_filename:
            return None
        # Two bytes an instruction. Line and columns are as of Python 3.11; without them nothing is found here.
        lines, end_lines, columns, end_columns = _positions(code)[frame.f_lasti // 2]
        kind = self.kinds.get((lines, columns, end_lines, end_columns))
        return None if kind == "end" and self._is_inside_itself(frame) else kind

    def _is_inside_itself(self, frame: FrameType) -> bool:
        count, outer = 0, cast("FrameType | None", frame)
        while outer is not None:
            count += outer.f_code is self.code
            outer = outer.f_back
        return count > 1


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> tuple[Position, ...]:
    return tuple(code.co_positions())


_NO_CONVERSION = -1
_STR_CONVERSION = 115


def sites_of(func: Callable[..., object]) -> Sites:
    """The reads of state variables in `func` whose value is only written on: as one text, or as a list of texts.

    "end" are reads in a `return` of the function itself that gives no state to anybody: nothing is appended after them.
    No place where the source is not to be had.
    """
    nowhere = Sites(None, {})
    try:
        lines, first = inspect.getsourcelines(func)
        source = "".join(lines)
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, SyntaxError, TypeError):
        return nowhere
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return nowhere
    found = _Body(tree.body[0], getattr(func, "__globals__", {})).sites()
    indent = len(source) - len(source.lstrip())
    code = inspect.unwrap(func).__code__
    return Sites(code, {_moved(node, first - 1, indent): kind for node, kind in found})


def _moved(node: ast.expr, lines: int, columns: int) -> Position:
    end_line, end_column = node.end_lineno, node.end_col_offset
    return (
        node.lineno + lines,
        node.col_offset + columns,
        None if end_line is None else end_line + lines,
        None if end_column is None else end_column + columns,
    )


class _Body:
    """One function's syntax: which names are states, which hold references, and where both end up."""

    def __init__(self, tree: ast.FunctionDef, names: Mapping[str, object]) -> None:
        self._tree = tree
        self._globals = names
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._loads: dict[str, list[ast.Name]] = {}
        self._stores: dict[str, list[ast.Name]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                where = self._loads if isinstance(node.ctx, ast.Load) else self._stores
                where.setdefault(node.id, []).append(node)
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._first = arguments[0].arg if arguments else ""
        parameters = [one.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for one in _all(node)]
        # A name that a parameter has, a lambda's too, may stand for anything; the state's own for the state only once.
        is_alone = parameters.count(self._first) == 1
        self._taken = set(parameters) - ({self._first} if is_alone else set()) | _bound_otherwise(tree)
        self._groups = self._names_of_groups()
        self._states = self._names_of_states()

    def sites(self) -> Iterator[tuple[ast.expr, Kind]]:
        for node in ast.walk(self._tree):
            match node:
                case ast.Subscript(value=state, ctx=ast.Load()) if self._is_state(state) and not self._is_guarded(node):
                    kind = self._kind(node)
                    if kind is not None:
                        yield node, kind
                case ast.Call(func=ast.Attribute(value=state, attr="get_var")) if self._is_state(state):
                    # Looked at for its type, it is written on nowhere.
                    if self._is_in_return(node) and not self._is_guarded(node):
                        yield node, "end"

    # -- which names are states -------------------------------------------------------------------------------------

    def _is_state(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._states
            case ast.Subscript(value=ast.Name(id=name), slice=index) if not isinstance(index, ast.Slice):
                return name in self._groups
            case _:
                return False

    def _names_of_groups(self) -> frozenset[str]:
        """Names that are only ever given what `.fork(...)` of the first parameter gives."""
        return frozenset(
            name
            for name, stores in self._stores.items()
            if name not in self._taken and self._is_set_by(stores, self._gets_forks)
        )

    def _gets_forks(self, store: ast.Name) -> bool:
        match self._parents[store]:
            case ast.Assign(targets=[ast.Name()], value=ast.Call(func=ast.Attribute(attr="fork", value=forked))):
                return isinstance(forked, ast.Name) and forked.id == self._first and self._is_the_state(forked.id)
            case _:
                return False

    def _is_set_by(self, stores: Sequence[ast.Name], is_right: Callable[[ast.Name], bool]) -> bool:
        """Is it set, and only so? An append leaves a state and a group what they are."""
        setting = [store for store in stores if not isinstance(self._parents[store], ast.AugAssign)]
        return bool(setting) and all(is_right(store) for store in setting)

    def _is_the_state(self, name: str) -> bool:
        """Is the first parameter only ever appended to, and nothing else called so?"""
        stores = self._stores.get(name, [])
        return name not in self._taken and all(isinstance(self._parents[store], ast.AugAssign) for store in stores)

    def _names_of_states(self) -> frozenset[str]:
        """The first parameter, where nothing else is called so, and what loops over groups of forks give."""
        found = set()
        if self._is_the_state(self._first):
            found.add(self._first)
        for name, stores in self._stores.items():
            if name not in self._taken and self._is_set_by(stores, self._gets_a_fork):
                found.add(name)
        return frozenset(found)

    def _gets_a_fork(self, store: ast.Name) -> bool:
        parent = self._parents[store]
        if isinstance(parent, ast.Tuple) and len(parent.elts) == 2 and parent.elts[1] is store:
            loop = self._parents[parent]
            match getattr(loop, "iter", None):
                case ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name(id=group)]):
                    return group in self._groups
            return False
        match parent:
            case ast.For(iter=ast.Name(id=group)) | ast.comprehension(iter=ast.Name(id=group)):
                return group in self._groups
            case ast.Assign(targets=[ast.Name()], value=ast.Subscript(value=ast.Name(id=group), slice=index)):
                return group in self._groups and not isinstance(index, ast.Slice)
            case _:
                return False

    # -- where a value ends up ----------------------------------------------------------------------------------------

    def _kind(self, read: ast.Subscript) -> Kind | None:
        if self._is_in_return(read):
            return "end"
        if self._is_written_on(read):
            return "text"
        parent = self._parents[read]
        match parent:
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[only]):
                return "list" if only is read and self._is_written_on(parent) else None
            case ast.Subscript(value=value, slice=index) if value is read and isinstance(parent.ctx, ast.Load):
                return "list" if not isinstance(index, ast.Slice) and self._is_written_on(parent) else None
            case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated):
                return "list" if iterated is read and self._carries(target) else None
            case ast.Assign(targets=[ast.Name() as target], value=value) if value is read:
                return "text" if self._carries(target) else None
            case _:
                return None

    def _carries(self, target: ast.expr) -> bool:
        """Is the name that is set here only ever written on?"""
        if not isinstance(target, ast.Name) or target.id in self._taken:
            return False
        return all(self._is_written_on(load) for load in self._loads.get(target.id, []))

    def _is_in_return(self, node: ast.AST) -> bool:
        while node is not self._tree:
            if isinstance(node, ast.Return):
                return not any(self._is_handed_on(name) for name in ast.walk(node) if isinstance(name, ast.Name))
            if isinstance(node, ast.Lambda | ast.FunctionDef):
                return False
            node = self._parents[node]
        return False

    def _is_handed_on(self, name: ast.Name) -> bool:
        """Might somebody append to a state that this name gives them?"""
        if name.id not in self._states | self._groups:
            return False
        match self._parents[name]:
            case ast.Subscript(value=read):
                return read is not name
            case ast.Attribute(attr="get_var") as method:
                call = self._parents[method]
                return not (isinstance(call, ast.Call) and call.func is method)
            case _:
                return True

    def _is_written_on(self, node: ast.AST) -> bool:
        """Does all that Python does with the value end in an append to a state?"""
        parent = self._parents[node]
        match parent:
            case ast.AugAssign(target=target, op=ast.Add(), value=value):
                return value is node and (self._is_state(target) or self._is_group(target))
            case ast.BinOp(op=ast.Add()) | ast.List() | ast.Tuple() | ast.JoinedStr():
                return self._is_written_on(parent)
            case ast.FormattedValue(conversion=conversion, format_spec=None):
                return conversion in (_NO_CONVERSION, _STR_CONVERSION) and self._is_written_on(parent)
            case ast.IfExp(test=test):
                return test is not node and self._is_written_on(parent)
            case ast.ListComp(elt=elt) | ast.GeneratorExp(elt=elt):
                return elt is node and self._is_written_on(parent)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[only]):
                is_of_texts = isinstance(node, ast.List | ast.Tuple | ast.ListComp | ast.GeneratorExp)
                return only is node and is_of_texts and self._is_written_on(parent)  # of a text: its letters
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr=name), args=[only]) if name in TURNS:
                # nw.user(...) makes a node that goes on its way; s.user(...) appends it itself.
                owner = parent.func.value if isinstance(parent.func, ast.Attribute) else parent.func
                if only is not node or self._is_state(owner):
                    return only is node
                return self._is_ours(owner, "niwaki") and self._is_written_on(parent)
            case ast.Call(func=ast.Name(id=name), args=[only]) if name in TURNS:
                return only is node and self._is_ours(parent.func, name) and self._is_written_on(parent)
            case ast.Lambda(body=body):
                return body is node and self._is_written_on(parent)
            case _:
                return False

    def _is_guarded(self, node: ast.AST) -> bool:
        """Would an error of the read be caught here, so that it must be raised here?"""
        while node is not self._tree:
            node = self._parents[node]
            if isinstance(node, ast.Try):
                return True
            if isinstance(node, ast.With) and not all(self._is_block(item.context_expr) for item in node.items):
                return True
        return False

    def _is_block(self, node: ast.expr) -> bool:
        """`with s.user():` and its like, which catch nothing."""
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._is_state(node.func.value)

    def _is_ours(self, node: ast.expr, name: str) -> bool:
        """Does the name stand for niwaki, or for its function of that name?"""
        if not isinstance(node, ast.Name) or node.id in self._stores or node.id in self._taken:
            return False
        found = self._globals.get(node.id)
        module = getattr(found, "__module__", "") if callable(found) else ""
        return getattr(found, "__name__", None) == name and (name == "niwaki" or module == "niwaki.lang.expressions")

    def _is_group(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._groups


def _all(arguments: ast.arguments) -> list[ast.arg]:
    extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _bound_otherwise(tree: ast.FunctionDef) -> set[str]:
    """Names that something else than a plain assignment, a loop or a parameter sets, or that live elsewhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found |= set(names)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name)
    return found
