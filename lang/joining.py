"""What forks bring home when they are joined, and what is told of those that failed."""

from __future__ import annotations

from collections.abc import Mapping

from niwaki.lang.steps import Join, Snapshot


def brought_home(node: Join) -> list[Snapshot]:
    """What each fork made, all of them being done. One that failed, where that is kept, has its error as the value of
    every variable that any of them has or was to set, and no text.

    Raises:
        What the first one failed with, and a note that tells which it is and what the others have.
    """
    made = {index: mark.result(0) for index, mark in enumerate(node.marks) if mark.error() is None}
    errors = {index: error for index, mark in enumerate(node.marks) if (error := mark.error()) is not None}
    for error in errors.values():
        if not (node.keeps_errors and isinstance(error, Exception)):
            error.add_note(_note(errors, made, len(node.marks)))
            raise error
    names = [
        name for index, told in enumerate(node.names) for name in (made[index].variables if index in made else told)
    ]
    return [
        made[index] if index in made else Snapshot(dict.fromkeys(names, errors[index]), (), has_turns=False)
        for index in range(len(node.marks))
    ]


def _note(errors: Mapping[int, BaseException], made: Mapping[int, Snapshot], count: int) -> str:
    first, *more = errors
    others = f" (so did {len(more)} others)" if more else ""
    have = [f"forks[{index}][{name!r}]" for index, snapshot in made.items() for name in snapshot.variables]
    shown = ", ".join(have[:4]) + (f" and {len(have) - 4} more" if len(have) > 4 else "")
    there = f"; there are {shown}" if have else ""
    return f"forks[{first}] of {count} that were joined failed{others}{there}; join(on_error='return') goes on"
