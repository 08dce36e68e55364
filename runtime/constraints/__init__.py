"""Constraints as masks over the vocabulary: what text may follow, decided token by token.

    compiler = ConstraintCompiler(Vocabulary(token_bytes, eos_ids))
    matcher = compiler.compile(Regex("[0-9]+")).matcher()
    matcher.fill_mask(row)

Knows bytes and token ids; never a model, a request or a tensor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Each loads where it is first used: the process that compiles needs none of them, nor NumPy and Numba behind them.
_HOMES = {
    "CompiledConstraint": "protocol",
    "ConstraintCompiler": "compiler",
    "Matcher": "protocol",
    "Vocabulary": "vocabulary",
    "compile_constraint": "compiler",
    "marks_of": "tools",
}

if TYPE_CHECKING:
    from niwaki.runtime.constraints.compiler import ConstraintCompiler, compile_constraint
    from niwaki.runtime.constraints.protocol import CompiledConstraint, Matcher
    from niwaki.runtime.constraints.tools import marks_of
    from niwaki.runtime.constraints.vocabulary import Vocabulary

__all__ = ["CompiledConstraint", "ConstraintCompiler", "Matcher", "Vocabulary", "compile_constraint", "marks_of"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
