"""What constraints need of a tokenizer, made for tests: the vocabulary of `toy.make_tokenizer`, a compiler for it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

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


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The tokens of its mask, ascending."""
    row = np.zeros(vocabulary.num_words, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def drawn_within(
    matcher: Matcher, vocabulary: Vocabulary, budget: int, rng: random.Random, likely: bytes, share: float
) -> bytes:
    """A text of at most so many tokens, each drawn of those that are admitted, as often as `share` of those that begin
    with a likely byte."""
    text = b""
    for remaining in range(budget, 0, -1):
        tokens = allowed(matcher, vocabulary)
        assert tokens, text
        first = [token for token in tokens if (vocabulary.bytes_of(token) or b"\0")[0] in likely]
        first = rng.sample(first, len(first)) if rng.random() < share else []
        order = [*first, *rng.sample(tokens, len(tokens))]
        token = next((token for token in order if matcher.admits(token, remaining)), None)
        assert token is not None, text
        matcher.accept(token)
        if token in vocabulary.eos_ids:
            break
        text += vocabulary.bytes_of(token) or b""
    return text


def check_masks_byte_by_byte(
    matcher: Matcher,
    vocabulary: Vocabulary,
    end: int,
    num_tokens: int,
    rng: random.Random,
    likely: bytes,
    shown: str,
    singles: bytes = bytes(range(256)),
) -> None:
    """Along a random text of so many tokens, or up to its `end`: a mask holds just the tokens that are taken byte by
    byte. Drawn are those that begin with a `likely` byte, if there are any; of single bytes `singles` are looked at."""
    for _ in range(num_tokens):
        tokens = allowed(matcher, vocabulary)
        for token, text in enumerate(vocabulary.token_bytes):
            if text and (len(text) > 1 or text in singles):
                place = matcher.clone()
                try:
                    for byte in text:
                        place.accept(byte)
                except ConstraintError:
                    assert token not in tokens, (shown, text)
                else:
                    assert token in tokens, (shown, text)
        some = [token for token in tokens if (vocabulary.bytes_of(token) or b"\xff")[0] in likely]
        if tokens == [end] or not (some or tokens):
            break
        matcher.accept(rng.choice(some or tokens))
