"""Constraints as masks over the vocabulary: what text may follow, decided token by token.

    compiler = ConstraintCompiler(Vocabulary(token_bytes, eos_ids))
    matcher = compiler.compile(Regex("[0-9]+")).matcher()
    matcher.fill_mask(row)

Knows bytes and token ids; never a model, a request or a tensor.
"""

from niwaki.runtime.constraints.compiler import ConstraintCompiler, compile_constraint
from niwaki.runtime.constraints.protocol import CompiledConstraint, Matcher
from niwaki.runtime.constraints.tools import marks_of
from niwaki.runtime.constraints.vocabulary import Vocabulary

__all__ = ["CompiledConstraint", "ConstraintCompiler", "Matcher", "Vocabulary", "compile_constraint", "marks_of"]
