"""What constraints need of a tokenizer, made for tests: the vocabulary of `toy.make_tokenizer`, a compiler for it."""

from __future__ import annotations

from pathlib import Path

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from tests.toy import make_tokenizer


def make_vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(Tokenizer(make_tokenizer(folder)).token_bytes, {1}, 450)


def make_compiler(folder: Path) -> ConstraintCompiler:
    """Close it."""
    return ConstraintCompiler(make_vocabulary(folder), seconds=20)


def takes(matcher: Matcher, text: str) -> bool:
    """Of a vocabulary whose first tokens are the bytes: whether the text, one by one, is whole. The matcher stays."""
    place = matcher.clone()
    try:
        for byte in text.encode():
            place.accept(byte)
    except ConstraintError:
        return False
    return place.can_end
