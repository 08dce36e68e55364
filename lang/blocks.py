"""What `with` holds open on a state: a chat turn, or the scope of a variable."""

from __future__ import annotations

from niwaki.lang.executor import Executor
from niwaki.lang.nodes import RoleBegin, RoleEnd, ScopeBegin, ScopeEnd
from niwaki.lang.origin import here


class Block:
    """What `with state.user():` and `with state.var_scope("x"):` enter: one node at the start, one at the end."""

    def __init__(self, executor: Executor, begin: RoleBegin | ScopeBegin, end: RoleEnd | ScopeEnd) -> None:
        self._executor = executor
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._executor.submit((self._begin,), here())

    def __exit__(self, *error: object) -> None:
        # Also after an exception: whoever catches it finds no turn left open.
        self._executor.submit((self._end,), here())
