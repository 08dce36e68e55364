"""How large the automaton of a pattern is that `types.py` wrote: enough to choose by, without compiling it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_CHARACTER_STATES: Final = 12  # of any character but a few, by its bytes in UTF-8
_PIECES: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?:|\{(?P<low>\d+),?(?P<high>\d*)\}|.", re.DOTALL)


@lru_cache(maxsize=1024)  # a program writes the same gen for each of its rows
def num_states(pattern: str) -> int:
    """About how many states it has with its counts written out, before it is made deterministic."""
    groups = [0]  # states so far, of each group that is open
    last = 0  # of what stands before a count
    for piece in _PIECES.finditer(pattern):
        match piece.group():
            case "(?:":
                groups.append(0)
                continue
            case ")":
                last = groups.pop()
            case "|" | "?" | "*" | "+":
                continue
            case text if text[0] == "{" and piece["low"]:
                last *= max(int(piece["low"]), int(piece["high"] or 0)) - 1  # once it is counted already
            case text:
                last = _CHARACTER_STATES if text.startswith("[^") else len(text.encode()) if len(text) == 1 else 1
        groups[-1] += last
    return groups[0]
