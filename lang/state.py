"""The state of a running program, as its author sees it. All it knows is its executor."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, Self, SupportsIndex, TypeAlias, cast, overload

from niwaki.lang.awaited import Awaited
from niwaki.lang.blocks import Block
from niwaki.lang.executor import Executor
from niwaki.lang.expressions import role
from niwaki.lang.foreign_names import FORKS, STATE, public
from niwaki.lang.meta import MetaInfo, PieceInfo, Usage, meta_info, probabilities
from niwaki.lang.misfits import explains_misfits
from niwaki.lang.nodes import (
    Content,
    Expression,
    NoContent,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    SetVariable,
    as_nodes,
)
from niwaki.lang.origin import here
from niwaki.lang.picture import picture_of
from niwaki.lang.run import running_loop
from niwaki.lang.steps import Join
from niwaki.lang.streams import AsyncPieces, AsyncStream, AsyncTexts, ValueStream, iterate
from niwaki.lang.tree import Tree, tree_of
from niwaki.lang.typed import as_type
from niwaki.runtime.api import ProgramError
from niwaki.runtime.api.names import hint
from niwaki.runtime.pictures.picture import Picture

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeForm, TypeVar

    T = TypeVar("T")
    R_co = TypeVar("R_co", default=object, covariant=True)
    P = ParamSpec("P", default=...)
else:  # no type variable of Python 3.11 has a default
    from typing import ParamSpec, TypeVar

    R_co = TypeVar("R_co", covariant=True)
    P = ParamSpec("P")

MAX_FORKS = 10_000


class _Held(enum.Enum):
    """A turn without a content; None is one that somebody forgot to set."""

    OPEN = enum.auto()


class State(NoContent, Generic[R_co]):
    """A text in the making, and its variables.

    `state += content` appends and returns at once. `state["x"]` reads a variable, `state["x"] = value` sets one, and
    `"x" in state` asks whether something sets it. Every read waits for what it reads; if the state has failed, every
    read raises the original error. A state may be used from several threads. For type checkers: R_co is what the body
    returns.
    """

    _remedy = "it has a text of its own, state.text(); f(s) goes on with the text of s"

    def __init__(self, executor: Executor | None = None, *, is_outside: bool = False) -> None:
        if executor is None:
            raise ProgramError("a state is made by a run: write a program, @function def f(s): ..., and call f.run()")
        self._executor = executor
        # A state handed out while its program still runs elsewhere: its readers wait for the program too.
        self._is_outside = is_outside

    # -- writing ------------------------------------------------------------------------------------------------------

    def __iadd__(self, content: Content) -> Self:  # type: ignore[misc]  # `+` is there only to be refused
        self._executor.submit(as_nodes(content), here())
        return self

    def __add__(self, content: object) -> NoReturn:
        raise ProgramError("state + ... would make another state, and there is none; write state += ...")

    __radd__ = __add__

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(value, Expression):
            raise ProgramError(
                f"a {type(value).__name__.lower()} is no value; append it, which sets its variable: s += gen({name!r})"
            )
        self._executor.submit((SetVariable(_variable_name(name), value),), here())

    def set_var(self, name: str, value: object) -> None:
        """The same as `state[name] = value`."""
        self[name] = value

    @overload
    def system(self, content: Content) -> None: ...
    @overload
    def system(self) -> Block: ...
    @explains_misfits
    def system(self, content: Content | _Held = _Held.OPEN) -> Block | None:
        """Append a system turn. Without content, `with state.system():` holds the turn open."""
        return self._turn("system", content)

    @overload
    def user(self, content: Content) -> None: ...
    @overload
    def user(self) -> Block: ...
    @explains_misfits
    def user(self, content: Content | _Held = _Held.OPEN) -> Block | None:
        """Append a user turn. Without content, `with state.user():` holds the turn open."""
        return self._turn("user", content)

    @overload
    def assistant(self, content: Content) -> None: ...
    @overload
    def assistant(self) -> Block: ...
    @explains_misfits
    def assistant(self, content: Content | _Held = _Held.OPEN) -> Block | None:
        """Append an assistant turn. Without content, `with state.assistant():` holds the turn open."""
        return self._turn("assistant", content)

    def var_scope(self, name: str) -> Block:
        """In `with state.var_scope("x"):` the text that is appended inside becomes the value of x."""
        _variable_name(name)
        return Block(self._executor, ScopeBegin(name), ScopeEnd(name))

    @explains_misfits
    def fork(self, count: int = 1) -> ForkGroup:
        """Make `count` states that start with everything that this one has. They run at once, on a shared prefix.

        Raises:
            ProgramError: the count is not from 1 to 10,000.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FORKS:
            raise ProgramError(f"fork needs a count from 1 to {MAX_FORKS}, got {count!r}")
        return ForkGroup(self._executor, self._executor.fork(count, here()))

    @contextmanager
    def copy(self) -> Iterator[State]:
        """A fork of one, for `with state.copy() as c:`; it is joined when the block ends."""
        group = self.fork(1)
        yield group[0]
        group.join()

    def cancel(self) -> None:
        """Stop this state and its forks. Their running generations end, and every read raises Cancelled."""
        self._executor.cancel()

    # -- reading ------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> object:
        return self._executor.variable(_variable_name(name), outside=self._is_outside)

    @overload
    def get_var(self, name: str) -> object: ...
    @overload
    def get_var(self, name: str, dtype: TypeForm[T]) -> T: ...
    def get_var(self, name: str, dtype: TypeForm[T] | None = None) -> object:
        """`state[name]`, which a type checker takes for a `dtype`; without one, for any object. Nothing is converted.

        Raises:
            ProgramError: the value is not of that type.
        """
        # Not through self[name]: a lazy executor looks at the line two frames up.
        value = self._executor.variable(_variable_name(name), outside=self._is_outside)
        return value if dtype is None else as_type(value, dtype, name)

    def __contains__(self, name: object) -> bool:
        """Is the variable set, or will something that was appended set it? Does not wait for generations."""
        return isinstance(name, str) and self._executor.has_variable(name, outside=self._is_outside)

    if not TYPE_CHECKING:  # a type checker is to see that there is no such attribute

        def __getattr__(self, name: str) -> object:
            if hasattr(type(self), name):  # read again: what failed with an AttributeError does so by its own words
                return object.__getattribute__(self, name)
            how = hint(name, STATE, public(State), 0.8)
            if name in ("gen", "select") or name.startswith("gen_"):
                how = f"; write s += nw.{name}(...)"
            elif name not in STATE or STATE[name].isidentifier():
                how += f"; a variable is s[{name!r}], and += appends"
            raise AttributeError(f"a state has no attribute {name!r}{how}")

        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("_"):
                raise AttributeError(f"a state takes no attribute {name!r}; a variable is set by s[{name!r}] = ...")
            object.__setattr__(self, name, value)

    def __reduce__(self) -> NoReturn:
        raise ProgramError(
            "a state holds its place in a backend and cannot be pickled or copied; take its text() and variables, or "
            "fork() it"
        )

    def __iter__(self) -> Iterator[str]:
        # Without this, `"x" in list(state)` and `for ... in state` would call state[0], state[1], ...
        raise TypeError("a state is not iterable; use text_iter() for its text or fork(n) for forks")

    def text(self) -> str:
        """The whole text, with what the chat template adds."""
        return self._executor.text(outside=self._is_outside)

    def messages(self) -> list[dict[str, str]]:
        """The finished chat turns, as mappings with "role" and "content"."""
        messages = self._executor.messages(outside=self._is_outside)
        return [{"role": message.role, "content": message.content} for message in messages]

    def sync(self) -> None:
        """Wait until everything appended so far has run."""
        self._executor.sync(outside=self._is_outside)

    def error(self) -> BaseException | None:
        """Wait, and return the error that the state failed with, or None."""
        return self._executor.error(outside=self._is_outside)

    @overload
    def get(self, name: str) -> Coroutine[object, object, object]: ...
    @overload
    def get(self, name: str, dtype: TypeForm[T]) -> Coroutine[object, object, T]: ...
    def get(self, name: str, dtype: TypeForm[T] | None = None) -> Coroutine[object, object, object]:
        """`await state.get(name)` is `state[name]` in an async program: it waits without blocking the event loop.

        `dtype` is as in `get_var`.

        Raises:
            ProgramError: no event loop runs here, so nobody could await it. Raised at once.
        """
        self._check_awaited("get(...)", 'write s["x"]')
        value = self._executor.variable_async(_variable_name(name), outside=self._is_outside)
        return Awaited(value if dtype is None else _typed(value, dtype, name), f"s.get({name!r})")

    def wait(self) -> Coroutine[object, object, None]:
        """`await state.wait()` is `sync()` in an async program. After it every other read returns at once.

        Raises:
            ProgramError: no event loop runs here, so nobody could await it. Raised at once.
        """
        self._check_awaited("wait()", "write s.sync()")
        return self._executor.sync_async(outside=self._is_outside)

    def _check_awaited(self, call: str, remedy: str) -> None:
        if self._executor.run.loop is None and running_loop() is None:
            raise ProgramError(f"{call} is awaited, and no event loop runs here to await it; {remedy}")

    def get_meta_info(self, name: str) -> MetaInfo:
        """How the variable was generated or selected: finish reason, tokens, log-probabilities."""
        return meta_info(self._executor.outcome(_variable_name(name), outside=self._is_outside))

    @overload
    def probabilities(self, name: str) -> dict[str, float]: ...
    @overload
    def probabilities(self, name: str, dtype: TypeForm[T]) -> dict[T, float]: ...
    def probabilities(self, name: str, dtype: TypeForm[T] | None = None) -> dict[str, float] | dict[T, float]:
        """Each choice that the variable was chosen among, and its probability; they sum to one, whatever the method.

        The keys are the choices' texts; with `dtype` their values, as `get_var(name, dtype)` would return them.

        Raises:
            ProgramError: neither a select nor a gen that compares the values of its type set the variable; or the
                values are not of that type.
        """
        found = probabilities(self._executor.outcome(_variable_name(name), outside=self._is_outside), name)
        if dtype is None:
            return {text: probability for text, _, probability in found}
        by_value: dict[T, float] = {}
        for _, value, probability in found:  # 1 and True are two texts, and equal
            key = as_type(value, dtype, name)
            by_value[key] = by_value.get(key, 0.0) + probability
        return by_value

    def text_iter(self, name: str | None = None, *, var_name: str | None = None) -> Iterator[str]:
        """The text, or one variable's text, in pieces as they come. They add up to the whole, even if you begin late.

        `var_name` is SGLang's spelling of `name`.
        """
        return iterate(self._executor, name or var_name, outside=self._is_outside)

    @overload
    def stream_value(self, name: str) -> ValueStream[object]: ...
    @overload
    def stream_value(self, name: str, dtype: TypeForm[T]) -> ValueStream[T]: ...
    def stream_value(self, name: str, dtype: TypeForm[T] | None = None) -> ValueStream[T] | ValueStream[object]:
        """The variable's value as it fills, for `for` and `async for`: partial values, and at the end `state[name]`.

        A partial value of a model or a dataclass is of that class, not validated, with None in the fields to come. A
        text grows, also inside such a value. Numbers, bools, Literals and Enums come when they are whole. A type
        checker takes all of them for a `dtype`, as in `get_var`.

        Raises:
            ProgramError: the finished value is not of that type.
        """
        return ValueStream(self._executor, _variable_name(name), dtype, outside=self._is_outside)

    @overload
    def text_async_iter(
        self, name: str | None = None, return_meta_data: Literal[False] = False, *, var_name: str | None = None
    ) -> AsyncStream[str]: ...
    @overload
    def text_async_iter(
        self, name: str | None = None, *, return_meta_data: Literal[True], var_name: str | None = None
    ) -> AsyncStream[tuple[str, PieceInfo]]: ...
    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False, *, var_name: str | None = None
    ) -> AsyncStream[str] | AsyncStream[tuple[str, PieceInfo]]:
        """`text_iter` for `async for`. With `return_meta_data`, pairs of a piece and a mapping about its tokens.

        The mapping has "completion_tokens" so far. If log-probabilities were asked for, it also has
        "output_token_logprobs" of this piece and "output_token_logprobs_length" so far. You may stop at any piece;
        nothing is left to close.
        """
        pieces = AsyncPieces(self._executor, name or var_name, outside=self._is_outside)
        return pieces if return_meta_data else AsyncTexts(pieces)

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the whole text."""
        return self._executor.token_ids(outside=self._is_outside)

    @property
    def usage(self) -> Usage:
        """The tokens that this state's own calls used, without those of its forks."""
        return self._executor.usage(outside=self._is_outside)

    @property
    def shortened(self) -> tuple[str, ...]:
        """The variables whose value a budget made shorter than the model wanted, in the whole run with its forks.

        Such a value is valid, and nothing in it shows that. A gen without a variable is named by its file and line.
        """
        return self._executor.shortened(outside=self._is_outside)

    @property
    def ret_value(self) -> R_co:
        """What the program's body returned."""
        return cast("R_co", self._executor.ret_value())

    def tree(self) -> Tree:
        """What this state and its forks made, as frozen data: each piece of text, how it came about, and when.

        Waits for the state, and for forks that somebody holds. An error of theirs is in the tree, and not raised.
        """
        self._executor.settle(outside=self._is_outside)
        return tree_of(self._executor.history)

    def show(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """`tree()` as a picture that a notebook shows; with `path`, it is also written there as one HTML file."""
        picture = picture_of((self.tree(),))
        if path is not None:
            picture.save(path)
        return picture

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        text = self._executor.text_so_far()  # a debugger must not have to wait
        shown = text if len(text) <= 200 else "..." + text[-200:]
        return f"<State of {self._executor.run.program}: {shown!r}>"

    def _turn(self, name: str, content: Content | _Held) -> Block | None:
        if content is _Held.OPEN:
            return Block(self._executor, RoleBegin(name), RoleEnd(name))
        self._executor.submit(role(name, content).nodes, here())
        return None


ForkContent: TypeAlias = "Content | Callable[[int], Content]"


class ForkGroup(NoContent, Sequence[State]):
    """The states that `fork` made, in order: `forks[0]`, `for fork in forks`.

    `forks += content` appends to each: the same content to all, one item of a list to each, or `f(i)` to fork i."""

    _remedy = "forks.join() brings their variables home, and forks.join('concat') their texts"

    def __init__(self, parent: Executor, children: Sequence[Executor]) -> None:
        self._parent = parent
        self._states = tuple(State(child) for child in children)
        self._is_joined = False

    if not TYPE_CHECKING:  # as in `State`

        def __getattr__(self, name: str) -> object:
            how = "" if name.startswith("_") else hint(name, FORKS, public(ForkGroup), 0.8)
            if name in public(State):
                how = f"; each fork has one: forks[0].{name}, or for fork in forks: fork.{name}"
            raise AttributeError(f"a group of forks has no attribute {name!r}{how}")

    def __repr__(self) -> str:
        count = len(self._states)
        return f"<{count} fork{'s' * (count > 1)} of {self._parent.run.program}>"

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...
    def __getitem__(self, index: object) -> State | Sequence[State]:
        if not isinstance(index, SupportsIndex | slice):
            raise ProgramError(
                f"forks[{index!r}] is no fork; forks[0][{index!r}] is the first one's variable, and after forks.join() "
                f"s[{index!r}] the list of all"
            )
        try:
            return self._states[index]
        except IndexError:
            count = len(self)
            raise _NoSuchFork(f"forks[{index}] is not there: {count} fork{'s' * (count > 1)}, from 0 on") from None

    def __setitem__(self, index: int, state: State) -> None:
        """Only what `forks[i] += ...` needs: the same state back in its place."""
        if state is not self[index]:
            raise ProgramError(f"fork {index} cannot be replaced; append to it with forks[{index}] += ...")

    def __iadd__(self, content: ForkContent) -> Self:
        """Append to every fork: the same text or expression to each, one item of a list to each, or f(i) to fork i.

        Raises:
            ProgramError: a list of another length than the group.
            What f raises, before anything is appended to any fork.
        """
        origin = here()
        if callable(content):
            each = [as_nodes(content(index)) for index in range(len(self))]
        elif isinstance(content, list | tuple):
            if len(content) != len(self):
                raise ProgramError(f"a list of {len(content)} items cannot be spread over {len(self)} forks")
            each = [as_nodes(item) for item in content]
        else:
            each = [as_nodes(content)] * len(self)
        for state, nodes in zip(self._states, each, strict=True):
            state._executor.submit(nodes, origin)
        return self

    def join(self, mode: str = "gather_variable", *, on_error: Literal["raise", "return"] = "raise") -> None:
        """Bring the forks' results into the parent, once they are done with what they have been given so far.

        With "gather_variable", each variable that is new in the forks becomes a list in the parent, with None for a
        fork that did not set it. With "concate_and_append", or "concat", the forks' texts are appended to the parent's,
        in order.

        If a fork fails, the parent fails once all are done, with a note that says which fork it was and what the others
        have. With on_error="return" the parent goes on: its lists have the error in the fork's place, and its text
        leaves the fork's out.

        Raises:
            ProgramError: joined twice, or an unknown mode or `on_error`.
        """
        if mode not in ("gather_variable", "concate_and_append", "concat"):
            raise ProgramError(f"join knows 'gather_variable', 'concate_and_append' and 'concat', got {mode!r}")
        if on_error not in ("raise", "return"):
            raise ProgramError(f"on_error is 'raise' or 'return', got {on_error!r}")
        if self._is_joined:
            raise ProgramError("these forks are joined already; fork again for another round")
        self._is_joined = True
        origin = here()
        executors = [state._executor for state in self._states]
        marks = tuple(executor.mark(origin) for executor in executors)
        histories = tuple(executor.history for executor in executors)
        names = tuple(executor.submitted_names() for executor in executors)
        step = Join(marks, mode != "gather_variable", histories, on_error == "return", names)
        self._parent.submit((step,), origin)


class _NoSuchFork(ProgramError, IndexError):
    pass


async def _typed(value: Coroutine[object, object, object], dtype: TypeForm[T], name: str) -> T:
    return as_type(await value, dtype, name)


def _variable_name(name: object) -> str:
    if isinstance(name, str) and name:
        return name
    raise ProgramError(f"a variable's name must be a non-empty string, got {name!r}")
