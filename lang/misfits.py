"""A call that does not fit its function: told in words, instead of Python's bare TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from niwaki.lang.foreign_names import OF_FUNCTION, TURN
from niwaki.runtime.api import ProgramError
from niwaki.runtime.api.names import hint

F = TypeVar("F", bound=Callable[..., object])


def explains_misfits(func: F) -> F:
    """The same function, to type checkers too. Arguments that it cannot take are a ProgramError, which says what may
    have been meant; a TypeError from inside it stays one."""

    @functools.wraps(func)
    def called(*args: object, **kwargs: object) -> object:
        try:
            return func(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(func)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as misfit:
                message = _explained(func.__name__, signature, args, kwargs) or f"{func.__name__}: {misfit}"
            else:
                raise
        raise ProgramError(message)

    return cast("F", called)


def _explained(
    function: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    names = [name for name in signature.parameters if name != "self"]
    args = args[len(signature.parameters) - len(names) :]
    foreign = OF_FUNCTION.get(function, {})
    by_name = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    positional = names[:-1] if by_name else names
    for name in kwargs:
        if name not in names and not by_name:
            said = hint(name, foreign, names) or f"; it takes {', '.join(names)}"
            return f"{function} has no option {name!r}{said}"
    if len(args) > len(positional):
        if foreign is TURN:
            return one_content(function)
        return f"{function} takes {', '.join(positional)} by position, got {len(args)} arguments; name its options"
    for name, value in zip(positional, args, strict=False):
        if name in kwargs:
            fault = f"{function} is given its {name} twice, {value!r} and {name}={kwargs[name]!r}"
            return fault + (before_or_behind(function, value) if name == "name" else "")
    return ""


def one_content(turn: str) -> str:
    """What is wrong with a turn of two contents."""
    return f"{turn} takes one content; add them up: {turn}('text' + gen('x')), or give a list of them"


def before_or_behind(function: str, value: object) -> str:
    """Where what stands in the place of a variable's name belongs."""
    if isinstance(value, list | tuple | set | frozenset):
        return f"; choices come behind it: {function}('name', [...])"
    return f"; text stands before it: s += 'text' + {function}('name')"
