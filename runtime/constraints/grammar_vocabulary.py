"""A vocabulary as llguidance wants it, and endings of texts written in the fewest of its tokens."""

from __future__ import annotations

import string
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from niwaki.runtime.api import ConfigError
from niwaki.runtime.constraints import kernels
from niwaki.runtime.constraints.distinct import Pieces
from niwaki.runtime.constraints.grammar_loops import LETTERS, NUMBER, QUOTE, STRING
from niwaki.runtime.constraints.grammar_strings import OpenStrings
from niwaki.runtime.constraints.guidance import CLOSING, ByteTokens, Native, tokenizer_of
from niwaki.runtime.constraints.protocol import address_of
from niwaki.runtime.constraints.vocabulary import Vocabulary, concatenated

JOINTS: Final = 32  # places of a known ending that are tried after another token
JOINT_BYTES: Final = 400
SHORT: Final = 8
OPENING: Final = frozenset(b'{[,:"')
# A byte of a number or literal may ask for three more; an escape or a character beyond ASCII for up to eleven.
PLAIN_COST: Final = 4
ESCAPE_COST: Final = 12
FIRST_TOKENS: Final = 6
LETTERS_AND_DIGITS: Final = (string.ascii_letters + string.digits).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """A text that completes another, from `start` on. At each place of the whole text: the first of the fewest tokens
    that write the rest, where it ends, and how many they are (one entry more: 0 at the end)."""

    whole: bytes
    firsts: kernels.Ints
    ends: kernels.Ints
    counts: kernels.Ints
    start: int = 0

    @property
    def text(self) -> bytes:
        return self.whole[self.start :]

    @property
    def num_tokens(self) -> int:
        return int(self.counts[self.start])

    def tokens(self, limit: int = 1 << 30) -> list[int]:
        """At most `limit` of them."""
        found: list[int] = kernels.token_path(self.firsts, self.ends, self.start, limit).tolist()
        return found

    def begins_with(self, text: bytes) -> bool:
        return self.whole.startswith(text, self.start)

    def behind(self, num_bytes: int) -> Ending:
        return self.from_byte(self.start + num_bytes)

    def rests(self, num_written: int = 0) -> list[int]:
        """From which of its bytes on a part may complete another text as well: what is left when as many characters
        were written as `num_written` (where they are counted, any will do), then the longest first: all of a short one;
        else the whole, and what stands behind something that closes."""
        size = len(self.whole) - self.start
        if size <= SHORT:
            return [*range(self.start, self.start + size + 1)]
        head = self.whole[self.start + 1 : self.start + JOINT_BYTES]
        found = (place for place, byte in enumerate(head, self.start + 1) if byte in CLOSING)
        counted = [self.start + num_written] if 0 < num_written < size else []
        return [*counted, self.start, *islice(found, JOINTS), self.start + size]

    def written_rests(self, num_written: int = 0) -> tuple[list[int], list[int]]:
        """Those of `rests` that are not empty: of how many tokens, and from which byte on."""
        starts = [start for start in self.rests(num_written) if start < len(self.whole)]
        return self.counts[starts].tolist(), starts

    def from_byte(self, start: int) -> Ending:
        return Ending(self.whole, self.firsts, self.ends, self.counts, start)


class GrammarVocabulary(ByteTokens):
    """Built once per vocabulary.

    Raises:
        ConfigError: it lacks end tokens or single bytes, without which no ending can be promised.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids or not vocabulary.has_every_byte:
            raise ConfigError("schemas and grammars need a vocabulary with an end token and every single byte")
        self.vocabulary = vocabulary
        self.eos_ids = sorted(vocabulary.eos_ids)
        self.tokenizer: LLTokenizer = tokenizer_of(vocabulary.token_bytes, self.eos_ids, vocabulary.size)
        openings = np.zeros(vocabulary.size, np.int64)
        plain_costs = np.full(vocabulary.size, PLAIN_COST, np.int64)
        self.num_characters = np.zeros(vocabulary.size, np.int32)  # that begin in each token
        # Arrays: a loop over 131k takes seconds.
        ids = [i for i in range(len(vocabulary.token_bytes)) if vocabulary.bytes_of(i) is not None]
        data, offsets = concatenated([vocabulary.token_bytes[i] or b"" for i in ids])
        openings[ids] = np.add.reduceat(np.isin(data, list(OPENING)), offsets[:-1], dtype=np.int64)
        self.num_characters[ids] = np.add.reduceat((data & 0xC0) != 0x80, offsets[:-1], dtype=np.int32)
        is_costly = np.logical_or.reduceat((data == ord("\\")) | (data >= 0x80), offsets[:-1])
        plain_costs[np.array(ids)[is_costly]] = ESCAPE_COST
        stays = np.zeros(vocabulary.size, np.uint8)
        stays[ids] = _stays(data, offsets)
        self.stays: bytes = stays.tobytes()  # by token, in which loops it stays: see `grammar_loops.py`
        # How far each token may move the end away: by what it may ask for inside, and by how much it may open.
        found, self.cost_kind_of = np.unique((openings << 8) + plain_costs, return_inverse=True)
        self.cost_kinds = [(int(kind) & 0xFF, int(kind) >> 8) for kind in found]
        self._scratch = threading.local()
        self.nothing = self.ending(b"")
        super().__init__([int(self.ending(bytes([byte])).firsts[0]) for byte in range(256)])
        self._byte_words = np.array(self.ids) >> 5
        self._byte_bits = np.uint32(1) << (np.array(self.ids) & 31).astype(np.uint32)
        self.open_strings = OpenStrings(vocabulary, self.tokenizer, self.ids)
        words = (piece for piece in vocabulary.token_bytes if piece and piece.isalpha())
        self.longest_word = max(words, key=len)

    def scratch(self) -> tuple[npt.NDArray[np.uint32], int, int]:
        """A row of this thread's for a mask that is copied at once, where it lies, and its bytes: to ask a new row for
        that takes as long as many a mask."""
        try:
            found: tuple[npt.NDArray[np.uint32], int, int] = self._scratch.row
        except AttributeError:
            row = np.zeros(self.vocabulary.num_words, np.uint32)
            found = self._scratch.row = row, address_of(row), row.nbytes
        return found

    @cached_property
    def pieces(self) -> Pieces:
        """For arrays that allow no item twice; made when one is met first."""
        return Pieces(self.vocabulary.token_bytes, self.ids, self._beginning_with)

    def _beginning_with(self, text: bytes) -> list[int]:
        found = self.vocabulary.subtree(text)
        if found is None:
            return []
        ids: list[int] = self.vocabulary.tokens_in(found[0] - 1, found[1]).tolist()
        return ids

    def in_mask(self, mask: bytes) -> bytes:
        return self.in_row(np.frombuffer(mask, np.uint32))

    def in_row(self, row: npt.NDArray[np.uint32]) -> bytes:
        """The single bytes that a mask allows, ascending."""
        return np.flatnonzero(row[self._byte_words] & self._byte_bits).astype(np.uint8).tobytes()

    def text_of(self, token_ids: Sequence[int]) -> bytes:
        texts = self.vocabulary.token_bytes
        return b"".join([texts[token_id] or b"" for token_id in token_ids])

    def allows_byte(self, row: npt.NDArray[np.uint32], byte: int) -> bool:
        token_id = self.ids[byte]
        return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)

    def written_within(self, text: bytes, count: int) -> tuple[kernels.Words, kernels.Flags]:
        """See `kernels.written_within`, of the first `count` places."""
        found = self.vocabulary
        rows, is_whole = np.zeros((count, found.num_words), np.uint32), np.zeros(count, np.bool_)
        kernels.written_within(
            np.frombuffer(text, np.uint8),
            found.roots,
            found.node_bytes,
            found.node_skips,
            found.node_tokens,
            found.tokens,
            rows,
            is_whole,
        )
        return rows, is_whole

    def ending(self, text: bytes) -> Ending:
        """The text, and from each of its places on the fewest tokens that write the rest."""
        firsts, ends = np.zeros(len(text), np.int32), np.zeros(len(text), np.int32)
        counts = np.zeros(len(text) + 1, np.int32)
        found = self.vocabulary
        kernels.fewest_tokens(
            np.frombuffer(text, np.uint8),
            found.node_bytes,
            found.node_skips,
            found.node_tokens,
            found.tokens,
            firsts,
            ends,
            counts,
        )
        return Ending(text, firsts, ends, counts)


def _stays(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """In which loops each text stays, and whether one may begin behind it."""
    is_plain = (data >= 0x20) & (data != ord('"')) & (data != ord("\\")) & (data < 0xF4)
    # As many bytes behind the first ones of characters as these ask for: no character is left open.
    asked = (data >= 0xC0).astype(np.int32) + (data >= 0xE0) + (data >= 0xF0) - ((data & 0xC0) == 0x80)
    starts = offsets[:-1]
    is_whole = (np.add.reduceat(asked, starts) == 0) & ((data[starts] & 0xC0) != 0x80)
    in_strings = np.logical_and.reduceat(is_plain, starts) & is_whole
    in_numbers = np.logical_and.reduceat((data >= ord("0")) & (data <= ord("9")), starts)
    is_word = (data >= 0x80) | np.isin(data, np.frombuffer(LETTERS_AND_DIGITS, np.uint8))
    has_letters = in_strings & np.logical_or.reduceat(is_word, starts)
    # Or such as have them behind a quote that opens one, of which there are none behind another.
    places = np.arange(len(data))
    last_quote = np.maximum.reduceat(np.where(data == ord('"'), places, -1), starts)
    last_letter = np.maximum.reduceat(np.where(is_word, places, -1), starts)
    is_bare = np.logical_and.reduceat(data != ord("\\"), starts)
    has_letters |= (last_quote >= 0) & (last_letter > last_quote) & is_bare & is_whole
    ends_open = data[offsets[1:] - 1] == ord('"')
    bits = ((in_strings, STRING), (in_numbers, NUMBER), (has_letters, LETTERS), (ends_open, QUOTE))
    found: npt.NDArray[np.uint8] = np.bitwise_or.reduce([is_so * np.uint8(bit) for is_so, bit in bits])
    return found


def completes(place: Native, ending: Ending, words: GrammarVocabulary, after: Sequence[int] = ()) -> bool:
    """Whether the text is complete with these tokens and then the ending."""
    return unread(place, ending, words, after) == 0


def unread(place: Native, ending: Ending, words: GrammarVocabulary, after: Sequence[int] = ()) -> int:
    """How many of the last tokens cannot follow, of these and then the ending and an end token."""
    wanted = [*after, *ending.tokens(FIRST_TOKENS)]
    if ending.num_tokens > FIRST_TOKENS:  # most that does not fit is told by the first ones
        taken = place.validate_tokens(wanted)
        if taken < len(wanted):
            return len(after) + ending.num_tokens + 1 - taken
        wanted = [*after, *ending.tokens()]
    wanted.append(words.eos_ids[0])
    return len(wanted) - place.validate_tokens(wanted)


class Shorter:
    """Rests of one ending, of which longer ones were tried before. Where two that begin alike fail at the same place
    before their end, what is missing stands in longer ones: of an array that must have 50 items each rest was tried at
    each token."""

    __slots__ = ("_failed", "_too_short")

    def __init__(self) -> None:
        self._failed: set[tuple[bytes, int]] = set()  # how they begin, and where they fail
        self._too_short: set[bytes] = set()

    def completes(self, place: Native, ending: Ending, words: GrammarVocabulary, after: Sequence[int] = ()) -> bool:
        """As the function; False at once where the rest is too short."""
        head = ending.whole[ending.start : ending.start + 1]
        if head in self._too_short:
            return False
        left = unread(place, ending, words, after)
        if (head, left) in self._failed:
            self._too_short.add(head)
        self._failed.add((head, left))
        return left == 0
