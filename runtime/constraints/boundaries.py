"""Where the tokenizer's cuts are settled: which tokens a known text surely becomes, whatever follows it.

A tokenizer cuts a text by what follows, so the end of a known text may merge with what is not written yet. Here its own
encoder is asked: the text is encoded with every continuation that a token of the vocabulary could make of its end, and
the tokens that all of them begin with are settled. Knows bytes and token ids; no constraint, no request.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final

import msgspec

from niwaki.runtime.constraints.protocol import ANY_BYTE, Forced
from niwaki.runtime.constraints.vocabulary import Vocabulary

TAIL_TOKENS: Final = 3  # before a text, that its first token may depend on
WINDOW_BYTES: Final = 48  # of a text's end, beyond which nothing that follows is looked at
HEALED_BYTES: Final = 16  # of a prompt's end: few, so that prompts that end alike are looked at once
MAX_PROBES: Final = 256  # tokens that begin with one end of the text; above, that place is taken as not settled
KNOWN_RUNS: Final = 8192
KNOWN_ENDS: Final = 2048
# Single characters that may follow: tokenizers tell classes of characters apart, and name some by themselves.
ASCII_PROBES: Final = frozenset(b"aAz09 \n\t'\"-_.,:;/\\(){}[]<@$!")
BEYOND_ASCII: Final = "éаก東🙂"

# The bytes around the begin of a word, and one more of it: a letter or digit behind a space, or a space before one.
_WORD_BEGINS: Final = re.compile(rb"(?=([\s][0-9A-Za-z]|[^\s\xff] (?=[0-9A-Za-z])))")

Encoder = Callable[[str], Sequence[int]]


class TextEnd(msgspec.Struct, frozen=True, gc=False):
    """How the end of a text may be cut. `settled`: its first bytes whose tokens stay. `crossings`: places at which a
    token may begin that ends behind the text."""

    settled: int
    crossings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The last `num_tokens` tokens of a prompt, which write `text`, may change with what follows. `paths` are the ways
    to write its beginning that the tokenizer itself would take, each before a token that reaches behind the text;
    the first one is the prompt's own tokens."""

    num_tokens: int
    text: bytes
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Known texts behind a prompt whose end they change. The last `num_open` tokens of the prompt were cut again with
    each text, the last `num_taken` of them may not stay; `tails`: for each text the tokens behind those that do."""

    num_open: int
    num_taken: int
    tails: list[list[int]]


class Boundaries:
    """What one tokenizer makes of known texts. Thread-safe; remembers what it was asked last.

    `encode` gives the tokens of a text by itself, special ones left out.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encoder) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self._pieces = [piece or b"" for piece in vocabulary.token_bytes]  # what each token writes
        for token_id in vocabulary.eos_ids:
            if token_id < len(self._pieces):
                self._pieces[token_id] = b""
        self._ends = lru_cache(KNOWN_ENDS)(self._found_end)
        self._runs = lru_cache(KNOWN_RUNS)(self._found_run)
        self._wait_for_pause: Callable[[], None] | None = None

    def steps_beside(self, wait_for_pause: Callable[[], None]) -> None:
        """An engine's loop runs in this process, and its steps go first: what may take a millisecond of texts encoded
        waits before each of them, as of `ConstraintCompiler.steps_beside`."""
        self._wait_for_pause = wait_for_pause

    def tokens_of(self, before: Sequence[int], forced: Forced) -> tuple[int, ...]:
        """The tokens that the tokenizer surely writes the forced text with, behind the tokens `before`; they may stop
        short of its end. None where the text before is cut inside a character, or the tokenizer cannot write it."""
        if not forced.text:
            return ()
        self._give_way()
        return self._runs(tuple(before[-TAIL_TOKENS:]), forced)

    def unsettled(self, ids: Sequence[int], start: int) -> Unsettled | None:
        """What of the end of `ids`, from token `start` on, may change with what follows; None where nothing may."""
        own = self._loose_end(ids, start)
        return self._unsettled_end(self._written(own), own) if own else None

    def joined(self, ids: Sequence[int], texts: Sequence[str]) -> Joined | None:
        """How the tokenizer writes each text behind `ids`; None where all their tokens stay, whichever text follows."""
        own = self._loose_end(ids, 0)
        head = self._written(own)
        kept, rows = len(own), []
        for text in texts:
            row = self._tokens(head + text.encode())
            if row is None:
                return None
            kept = min(kept, next((i for i, (a, b) in enumerate(zip(own, row, strict=False)) if a != b), kept))
            rows.append(row)
        if kept == len(own):
            return None
        return Joined(len(own), len(own) - kept, [list(row[kept:]) for row in rows])

    # -- helpers

    def _loose_end(self, ids: Sequence[int], start: int) -> tuple[int, ...]:
        """The longest end, of HEALED_BYTES or so, that the tokenizer would write as it stands; empty where none is."""
        first = len(ids)
        size = 0
        while first > start and size < HEALED_BYTES:
            piece = self._vocabulary.bytes_of(ids[first - 1])
            if piece is None:
                break
            first -= 1
            size += len(piece)
        ends = (tuple(ids[begin:]) for begin in range(first, len(ids)))
        return next((own for own in ends if self._tokens(self._written(own)) == own), ())

    def _unsettled_end(self, text: bytes, own: tuple[int, ...]) -> Unsettled | None:
        end = self._ends(text, ANY_BYTE)
        kept = _num_within(self._ends_of(own), end.settled)
        if kept == len(own):
            return None
        taken = own[kept:]
        settled = len(text) - len(self._written(taken))
        paths = [taken]
        for place in end.crossings:
            tokens = self._tokens(text[:place])
            if tokens is not None and tokens[:kept] == own[:kept] and place >= settled:
                paths.append(tokens[kept:])
        return Unsettled(len(taken), text[settled:], tuple(dict.fromkeys(paths)))

    def _found_run(self, before: tuple[int, ...], forced: Forced) -> tuple[int, ...]:
        text = _whole_characters(forced.text)
        follow = forced.follow if len(text) == len(forced.text) else forced.text[len(text) : len(text) + 1]
        settled = self._ends(text, follow).settled if text else 0
        if not settled:
            return ()
        if any(chr(byte).isalpha() or byte > 0x7F for byte in follow):
            settled = min(settled, _word_start(text))
        for begin in range(len(before) + 1):
            tail = before[begin:]
            head = b"".join(self._vocabulary.bytes_of(token_id) or b"\xff" for token_id in tail)
            tokens = self._tokens(head + text)
            if tokens is not None and tokens[: len(tail)] == tail:
                run = tokens[len(tail) :]
                return run[: _num_within(self._ends_of(run), settled)]
        return ()

    def _found_end(self, text: bytes, follow: bytes) -> TextEnd:
        """`follow`: the bytes that may stand behind the text; none where it is the end of all."""
        own = self._tokens(text)
        if own is None:
            return TextEnd(0, ())
        if not follow:
            return TextEnd(len(text), ())
        ends = self._ends_of(own)
        skipped = self._begin_of_last_word(text, ends)
        skipped = skipped or next((end for end in reversed(ends) if len(text) - end >= WINDOW_BYTES), 0)
        if skipped:  # what stands so far before the end plays no part, where the tokenizer cuts the rest alike
            rest = self._tokens(text[skipped:])
            if rest is not None and rest == own[ends.index(skipped) + 1 :]:
                end = self._ends(text[skipped:], follow)
                return TextEnd(skipped + end.settled, tuple(skipped + place for place in end.crossings))
        settled = len(text)
        known = text.decode()
        behind: dict[bytes, tuple[int, ...] | None] = {}  # tokens of several lengths may go on alike

        def changed(probe: bytes) -> tuple[int, ...] | None:
            """The tokens where the text goes on so: `own` itself where all of these stay."""
            if probe not in behind:
                behind[probe] = self._tokens_behind(known, own, probe)
            return behind[probe]

        for probe in _characters(follow):
            tokens = changed(probe)
            if tokens is not own:
                settled = min(settled, self._shared(own, tokens))
        crossings = []
        allowed = None if len(follow) == 256 else frozenset(follow)
        for place in range(len(text) - 1, max(-1, len(text) - self._vocabulary.max_token_bytes), -1):
            probes = self._extensions(text[place:], allowed)
            if not probes:
                continue
            if len(probes) > MAX_PROBES:  # too many to ask for each
                probes = probes[:: len(probes) // 64]
                settled = min(settled, next((end for end in reversed((0, *ends)) if end <= place), 0))
            # Where all of its own tokens stay, one ends with the text: none reaches over that end.
            others = [tokens for probe in _texts(probes) if (tokens := changed(probe)) is not own]
            settled = min([settled, *(self._shared(own, tokens) for tokens in others)])
            if any(self._cuts_at(tokens, place, len(text)) for tokens in others):
                crossings.append(place)
        return TextEnd(settled, tuple(crossings))

    def _begin_of_last_word(self, text: bytes, ends: Sequence[int]) -> int:
        """The last place where a word begins that no token of the vocabulary reaches over. So whatever follows, both
        sides are cut by themselves, and texts whose last words are alike are looked at once. 0: there is none."""
        for found in reversed(list(_WORD_BEGINS.finditer(text))):
            place = found.start() + 1
            if found[1] not in self._joined_bytes and place in ends:
                return place
        return 0

    @cached_property
    def _joined_bytes(self) -> frozenset[bytes]:
        """The pairs of bytes at which a word may begin that stand inside of tokens."""
        return frozenset(found[1] for found in _WORD_BEGINS.finditer(b"\xff".join(self._vocabulary.sorted_texts)))

    def _extensions(self, end: bytes, allowed: AbstractSet[int] | None) -> list[bytes]:
        """What tokens that begin with `end` write behind it, where its first byte is allowed; None: each is."""
        texts = self._vocabulary.sorted_texts
        first = bisect_right(texts, end)
        if first == len(texts) or not texts[first].startswith(end):
            return []
        last = bisect_left(texts, _behind_all(end), lo=first)
        if allowed is None:
            return [text[len(end) :] for text in texts[first:last]]
        return [text[len(end) :] for text in texts[first:last] if text[len(end)] in allowed]

    def _tokens_behind(self, text: str, own: tuple[int, ...], probe: bytes) -> tuple[int, ...] | None:
        """As `_tokens`, of the text with what it goes on with; `own` itself where its tokens begin them, as mostly."""
        self._give_way()
        whole = text + probe.decode()
        tokens = tuple(self._encode(whole))
        if tokens[: len(own)] == own:
            return own if self._written(tokens[len(own) :]) == probe else None
        return tokens if self._written(tokens) == whole.encode() else None

    def _shared(self, own: tuple[int, ...], tokens: tuple[int, ...] | None) -> int:
        """How many bytes both begin with, in the same tokens."""
        if tokens is None:
            return 0
        same = next(
            (i for i, (a, b) in enumerate(zip(own, tokens, strict=False)) if a != b), min(len(own), len(tokens))
        )
        return self._ends_of(own[:same])[-1] if same else 0

    def _cuts_at(self, tokens: tuple[int, ...] | None, place: int, end: int) -> bool:
        """Whether one of the tokens reaches from `place` over `end`."""
        cuts = (0, *self._ends_of(tokens or ()))
        return place in cuts and not any(place < cut <= end for cut in cuts)

    def _tokens(self, text: bytes) -> tuple[int, ...] | None:
        """The tokens of a text; None where it is none, or they do not write it."""
        self._give_way()
        try:
            tokens = tuple(self._encode(text.decode()))
        except UnicodeDecodeError:
            return None
        return tokens if self._written(tokens) == text else None

    def _give_way(self) -> None:
        if self._wait_for_pause is not None:
            self._wait_for_pause()

    def _written(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, tokens))

    def _ends_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Where each token ends in the text that they write."""
        return tuple(accumulate(map(len, map(self._pieces.__getitem__, tokens))))


def _num_within(ends: Sequence[int], limit: int) -> int:
    return sum(end <= limit for end in ends)


@lru_cache(KNOWN_ENDS)
def _characters(follow: bytes) -> tuple[bytes, ...]:
    """Characters to stand for what may follow."""
    ascii_ones = [bytes([byte]) for byte in follow if byte in ASCII_PROBES]
    if not ascii_ones:
        ascii_ones = [bytes([byte]) for byte in follow if byte < 0x80]
    # A word that the tokenizer knows whole may end at a letter, and be cut otherwise where one more follows.
    longer = [one + b"q" for one in ascii_ones if one.isalpha()]
    return (*ascii_ones, *longer, *(char for char in map(str.encode, BEYOND_ASCII) if char[0] in follow))


def _word_start(text: bytes) -> int:
    """Where the word begins that the text ends in, with the character before it; at the text's end where it is in none.
    What such a word becomes may decide how all of it is cut: tokenizers know some words by a pattern, without a token
    of theirs for each."""
    known = text.decode()
    head = known.rstrip("".join({char for char in known if char.isalpha()}))
    return len(text) if head == known else len(head[:-1].encode())


def _whole_characters(text: bytes) -> bytes:
    """The text without an unfinished character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # a first byte: how long is its character?
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text if length <= back else text[:-back]
    return text


def _completed(text: bytes) -> bytes:
    """The text with its last character made whole."""
    whole = _whole_characters(text)
    lead = text[len(whole) :]
    if not lead:
        return text
    for char in BEYOND_ASCII:
        if char.encode().startswith(lead):
            return whole + char.encode()
    length = 2 if lead[0] < 0xE0 else 3 if lead[0] < 0xF0 else 4
    second = {0xE0: b"\xa0", 0xF0: b"\x90"}.get(lead[0], b"\x80") if len(lead) == 1 else b""
    return whole + (lead + second + b"\x80\x80")[:length]


def _texts(probes: Sequence[bytes]) -> Iterator[bytes]:
    """Those that are text, once their last character is made whole."""
    for probe in probes:
        if probe.isascii():
            yield probe
            continue
        whole = _completed(probe)
        try:
            whole.decode()
        except UnicodeDecodeError:
            continue
        yield whole


def _behind_all(prefix: bytes) -> bytes:
    """The least byte string above all that begin with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 64
