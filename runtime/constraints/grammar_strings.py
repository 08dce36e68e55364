"""The masks inside strings that nothing tells apart any more, put together from what a vocabulary knows of them.

Such a string goes on with any characters and ends at any quote (`grammar_loops.py`), so that most of its mask is the
same for all schemas: to have it worked out again took 108 microseconds at the first string of each. What hangs on the
schema are tokens that close the string and go on behind it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from niwaki.runtime.constraints.guidance import Native, build, byte_tokenizer
from niwaki.runtime.constraints.protocol import address_of
from niwaki.runtime.constraints.schema.spelling import BASICS
from niwaki.runtime.constraints.vocabulary import Vocabulary

STRING, KEY = "STRING", "KEY"  # of `BASICS`: in any spelling, and in one only
QUOTE: Final = b'"'
TOLD_APART: Final = b"\\/"  # a spelling that a key has not
# What may follow one in JSON, and what may follow that: nothing else is tried.
_BEHIND: Final = re.compile(rb'[,:](?:["{[\-0-9tfn\s]|\Z)|[\]}](?:[,\]}\s]|\Z)|\s')


class OpenStrings:
    """Of one vocabulary, `ids`: its tokens of single bytes."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: LLTokenizer, ids: Sequence[int]) -> None:
        self._ids = ids
        self._told_apart = [ids[byte] for byte in TOLD_APART]
        quoted = {
            token_id: text
            for token_id, text in enumerate(vocabulary.token_bytes)
            if text and QUOTE in text and token_id not in vocabulary.eos_ids
        }
        self._kinds = {name: _Inside(name, quoted, vocabulary, tokenizer, ids) for name in (STRING, KEY)}

    def mask(self, place: Native, *, may_be_key: bool) -> npt.NDArray[np.uint32]:
        """Inside such a string. `may_be_key`: there may be strings that are spelled in one way only."""
        is_key = may_be_key and place.validate_tokens(self._told_apart) < len(self._told_apart)
        behind = place.deep_copy()
        behind.consume_token(self._ids[QUOTE[0]])
        return self._kinds[KEY if is_key else STRING].mask(behind)


class _Inside:
    """One of `BASICS`. `quoted`: the tokens with a quote, and what they write."""

    def __init__(
        self,
        name: str,
        quoted: Mapping[int, bytes],
        vocabulary: Vocabulary,
        tokenizer: LLTokenizer,
        ids: Sequence[int],
    ) -> None:
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: {name}\n{BASICS[name]}\n'
        opened = build(grammar, tokenizer, is_shallow=True)
        opened.consume_token(ids[QUOTE[0]])
        self._row = np.zeros(vocabulary.num_words, np.uint32)  # of tokens that stay inside, or end with the string
        opened.unsafe_compute_mask_ptr(address_of(self._row), self._row.nbytes)
        bare = build(grammar, byte_tokenizer(), is_shallow=True)
        bare.consume_token(QUOTE[0])
        closing: dict[bytes, list[int]] = {}
        for token_id, text in quoted.items():
            inside = bare.validate_tokens([*text])  # to the quote that closes it
            if 0 < inside < len(text) and text[inside - 1] == QUOTE[0] and _BEHIND.match(text, inside):
                closing.setdefault(text[inside:], []).append(token_id)
        self._rests = sorted(closing)  # what such tokens write behind the string
        self._spelled = [[ids[byte] for byte in rest] for rest in self._rests]
        self._tokens = [closing[rest] for rest in self._rests]
        self._above = b"\xff" * (vocabulary.max_token_bytes + 1)  # any of them, behind what they begin with

    def mask(self, behind: Native) -> npt.NDArray[np.uint32]:
        """`behind`: where the string is closed."""
        row = self._row.copy()
        number = 0
        while number < len(self._rests):
            spelled = self._spelled[number]
            num_read = behind.validate_tokens(spelled)
            if num_read < len(spelled):  # nor may what else begins so
                number = bisect_left(self._rests, self._rests[number][: num_read + 1] + self._above, number + 1)
                continue
            for token_id in self._tokens[number]:
                row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
            number += 1
        return row
