"""llguidance's grammars: built on a thread with a deep stack, tried over single bytes, searched for a short text.

Imports the standard library and llguidance only: the process that compiles starts quickly.
"""

from __future__ import annotations

import heapq
import os
import random
import re
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

STACK_BYTES: Final = 64 * 1024 * 1024  # llguidance recurses over references: 1,000 chained ones overflow 8 MiB
# llguidance does about 50,000 a millisecond and stops a text at its limit, 200,000 by default: counts of words beside a
# length met that in the middle of valid texts, the worst at 10 ms.
STEP_FUEL: Final = 2_000_000
# What may follow at one place, in places of rules: all are gone through for each, and what more may follow is refused.
# An object of a schema has two for each key that may be left out, 4,000 at most, which take 10 ms.
MAX_ITEMS: Final = 2000
MAX_SCHEMA_ITEMS: Final = 5000
TRIAL_STEPS: Final = 24
SEARCH_EFFORT: Final = 12_000
PIECES_EFFORT: Final = 500
COPIED_BYTES: Final = 200  # of text, which cost as much to copy as a place costs otherwise
# Bytes worth trying for a short text where many may follow: they close, or begin what is short.
LIKELY: Final = b'"}]0,:1n-{[a A.t'
FEW: Final = 12
# Bytes on the straight way to an end: what closes, what must come before it, then what is short when it opens.
STRAIGHT: Final = b'}]",:1234567890.-ntfa [{'
STRAIGHT_BYTES: Final = 4000
CLOSING: Final = b'"}],'
BRACKETS: Final = b"}]"
QUOTE: Final = CLOSING[0]
LETTER: Final = ord("a")
CLOSE_ARRAY: Final = ord("]")
ITEM_BEGINS: Final = b"[, \n"
KEY_ENDS: Final = b'":'
CONTEXT: Final = 3  # bytes: what stands before a key, `[{"` or `:{"`
MOST_LETTERS: Final = 512  # that are tried for the end of a string
MASKS_COMPARED: Final = 8  # one mask is too little: after `,` and after `:` a quote may be all that follows
# Tokens of these characters are looked at together where any text of them may follow: in strings, and in keys that are
# none of some. llguidance's own hold characters that our keys do not: of 131,072 tokens the first mask inside a key
# takes 0.15 ms with these and 1.2 with those. Where lengths are bounded, short ones are looked at together still: of
# strings of at most 8 to 66 characters a mask took 0.10 ms so, and 0.19 with 10 and 30 characters alone.
_IN_STRINGS: Final = r"[\x20-\x21\x23-\x5B\x5D-\x7E\x{A0}-\x{D7FF}]"
SLICES: Final = tuple(f"{_IN_STRINGS}{{1,{most}}}" for most in (3, 6, 12, 30))
MIN_SLICED: Final = 4096  # tokens: fewer are walked as quickly, and each grammar is built 0.1 ms sooner
NICENESS: Final = 5  # of threads that compile, above the engine's own: its steps go first
OF_PROCESSES: Final = 12  # of processes that do. At 5 and 10 a stream beside hostile schemas still waits for them
_OF_STEPS: Final = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
# What a grammar spells out: characters that mean nothing else in a regex, and such as are written by their numbers.
_SPELLED: Final = re.compile(r"(?:\\x\{[0-9A-Fa-f]{1,6}\}|\\x[0-9A-Fa-f]{2}|\\[^\w\s]|[^\\\s()\[\]{}|*+?.^$/\":&~])+")
_ESCAPED: Final = re.compile(r"\\(?:x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|(.))")
_deep_lock = threading.Lock()


class Native(Protocol):
    """What is asked of an `LLMatcher`, and of what checks beside one (`distinct.py`)."""

    def deep_copy(self) -> Native: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def compute_ff_bytes(self) -> bytes: ...
    def compute_bitmask(self) -> bytes: ...
    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def consume_tokens(self, tokens: list[int]) -> bool: ...
    def consume_token(self, token: int) -> bool: ...


class _Spelling:
    """What llguidance wants to know of a tokenizer. It never asks it to encode: masks are walked, not encoded."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_id

    def __call__(self, text: bytes) -> list[int]:
        return []


def tokenizer_of(
    tokens: Sequence[bytes | None], eos_ids: Sequence[int], size: int, slices: Sequence[str] | None = None
) -> LLTokenizer:
    """A tokenizer of llguidance over these tokens; None and what is beyond them is never allowed by a mask. `slices`:
    regexes of tokens that are looked at together, which change no mask; None: those that suit our grammars."""
    if slices is None:
        slices = SLICES if size >= MIN_SLICED else ()
    # A first byte of 0xff marks what no text holds; each needs a name of its own.
    spelled = [piece or b"" for piece in tokens[:size]] + [b""] * (size - len(tokens))
    hidden = {i for i, piece in enumerate(spelled) if not piece} | set(eos_ids)
    for i in hidden:
        spelled[i] = b"\xff<%d>" % i
    wrapper = TokenizerWrapper(_Spelling(spelled, sorted(hidden), eos_ids[0]))
    return LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_ids), slices=list(slices))


class Effort:
    """What searches may still cost together, in places looked at: 10 to 50 us each, 0.2 ms where many known ends are
    tried at each, so a limit in time that does not depend on the machine's load."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def add(self, more: int, most: int) -> None:
        """Up to `most` that are left."""
        self.left = min(max(self.left, 0) + more, most)

    def part(self, most: int) -> Effort:
        """At most so much of what is left, taken from it at once."""
        part = Effort(min(self.left, most))
        self.left -= part.left
        return part

    def take(self, cost: int = 1) -> bool:
        """Spend some; False once all is spent."""
        self.left -= cost
        return self.left >= 0


class ByteTokens:
    """The tokens of the single bytes: ids[b] is that of b."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    def in_mask(self, mask: bytes) -> bytes:
        """The bytes that a mask allows, ascending."""
        return bytes(byte for byte, token in enumerate(self.ids) if mask[token >> 3] >> (token & 7) & 1)


SINGLE_BYTES: Final = ByteTokens(range(256))


@cache
def byte_tokenizer() -> LLTokenizer:
    """Every byte a token; token 256 ends. Made once: that takes a millisecond."""
    return tokenizer_of([bytes([byte]) for byte in range(256)], [256], 257)


def give_way() -> None:
    """Lower this thread's priority for good: the engine's steps go first."""
    if sys.platform == "linux":  # where it is this thread's alone
        # Never less nice than it is, which only root may.
        os.setpriority(os.PRIO_PROCESS, 0, max(_OF_STEPS + NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def build(grammar: str, tokenizer: LLTokenizer, *, is_shallow: bool = False, max_items: int = MAX_ITEMS) -> LLMatcher:
    """A matcher of a Lark grammar in llguidance's dialect. May take for ever, without the interpreter's lock.
    `is_shallow`: this thread's stack is surely deep enough; the others are built one after the other.

    Raises:
        ValueError: llguidance refuses it.
    """
    made: list[LLMatcher] = []

    def make() -> None:
        limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, max_items_in_row=max_items)
        made.append(LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits))

    def make_beside_others() -> None:
        give_way()
        make()

    if is_shallow:
        make()
    else:
        with _deep_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=make_beside_others, name="niwaki-grammar")
                thread.start()
            finally:
                threading.stack_size(before)
            thread.join()
    if not made:
        raise ValueError("llguidance failed on it")
    if made[0].is_error():
        raise ValueError(short_reason(made[0].get_error()))
    return made[0]


def short_reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[:1] == ["NoExtensionBias"]:
        return "no token may follow, and the text may not end here"
    if lines[:1] == ["no start rule found"]:
        return "no rule is called 'start', with which a text begins"
    if not lines:
        return "unknown reason"
    fault = next((line for line in lines if line.startswith("error: ")), "") if lines[0].endswith("error:") else ""
    return (lines[0].removesuffix(":") + fault.removeprefix("error"))[:300]


KnownEnd = Callable[[Native], "bytes | None"]  # the rest of the text, from where it is known


def accepted(place: Native) -> bytes | None:
    return b"" if place.is_accepting() else None


def short_text(
    matcher: Native,
    byte_tokens: ByteTokens,
    effort: Effort,
    known_end: KnownEnd = accepted,
    num_before: int = 0,
    likely: bytes = LIKELY,
) -> bytes | None:
    """A short continuation, in bytes, after which the text may end: the shortest that the search meets.

    Uniform-cost over bytes. Among places as far away and with the same last masks one is kept at first, and where very
    many bytes may follow only the `likely` ones are tried: both cost no correctness, only at times a byte.
    None where the effort was in vain; behind `num_before` bytes and more a place counts as several, for its copies.
    """
    half = Effort(effort.left // 2)
    effort.left -= half.left
    found, has_pruned = _searched(matcher, byte_tokens, half, known_end, num_before, likely)
    effort.left += max(0, half.left)
    if found is None and has_pruned:
        found, _ = _searched(matcher, byte_tokens, effort, known_end, num_before)
    if found is None and effort.left > 0:  # one that was not kept may have been the way
        found, _ = _searched(matcher, byte_tokens, effort, known_end, num_before, merges=False)
    return found


def straight_text(
    matcher: Native,
    byte_tokens: ByteTokens,
    effort: Effort,
    known_end: KnownEnd = accepted,
    closings: Sequence[bytes] = (),
    looks_behind: bytes = CLOSING,
    example: bytes = b"",
    end_behind_key: Callable[[Native, bytes], bytes | None] = lambda place, key: None,
    array_ends: Sequence[bytes] = (),
) -> bytes | None:
    """A continuation after which the text may end, closing at every place what can be closed: some tens of steps where
    a search looks at thousands of places. Often the shortest; None where it does not end within STRAIGHT_BYTES or the
    effort.

    `closings`: what strings may have to end with, their quotes included. `looks_behind`: bytes behind which `known_end`
    is asked. `example`: a whole text, followed where nothing else tells which key to take: any may lead to itself.
    `end_behind_key`: as `known_end`, behind a key and its colon. `array_ends`: what arrays may have to end with.
    """
    place = matcher.deep_copy()
    text = b""
    tried: set[int] = set()  # since something closed or was forced: these are taken again when no other byte may follow
    while len(text) <= STRAIGHT_BYTES and not place.is_error() and effort.take():
        end = known_end(place) if place.is_accepting() or text[-1:] in looks_behind else None
        if end is None and text[-2:] == KEY_ENDS:
            end = end_behind_key(place, text[text.rfind(b'"', 0, -2) :])
        if end is not None:
            return text + end
        forced = place.compute_ff_bytes()
        # Behind a comma a known end is looked for, before a key is begun that may not be the one which is wanted.
        forced = forced[: forced.find(b",") + 1] or forced
        closing = b"" if forced else _closing(place, byte_tokens, closings)
        if array_ends and not forced and not closing and (not text or text[-1:] in ITEM_BEGINS):
            closing = _array_end(place, byte_tokens, array_ends)
        follow = forced or closing or _nearest(place, byte_tokens, tried, _behind(text[-CONTEXT:], example))
        # A character of a string closes nothing. A bracket that does may be needed again at once.
        closes = follow in CLOSING and (follow == b'"' or not place.validate_tokens([byte_tokens.ids[LETTER]]))
        is_bracket = closes and follow in BRACKETS
        if not follow or place.try_consume_tokens([byte_tokens.ids[byte] for byte in follow]) < len(follow):
            return None
        if forced or closing or closes or follow[0] in tried:
            tried.clear()
        tried.update(() if forced or is_bracket else follow)
        text += follow
    return None


def _closing(place: Native, byte_tokens: ByteTokens, closings: Sequence[bytes]) -> bytes:
    """The one that ends the string here, which a quote alone does not, or letters that do. Nothing where no string is
    open, or none does."""
    quote, letter = byte_tokens.ids[QUOTE], byte_tokens.ids[LETTER]
    if place.validate_tokens([quote]):
        return b""
    for closing in closings:
        if place.validate_tokens([byte_tokens.ids[byte] for byte in closing]) == len(closing):
            return closing

    def ends_behind(count: int) -> bool:
        return place.validate_tokens([letter] * count + [quote]) == count + 1

    room = place.validate_tokens([letter] * MOST_LETTERS)
    enough = next(filter(ends_behind, (*(1 << power for power in range(room.bit_length())), room)), 0)
    if not room or not enough:
        return b""
    least = enough // 2 + 1
    return bytes([LETTER]) * (least + bisect_left(range(least, enough), True, key=ends_behind)) + bytes([QUOTE])


def _array_end(place: Native, byte_tokens: ByteTokens, array_ends: Sequence[bytes]) -> bytes:
    """The one that ends the array whose item begins here; nothing where none does, or it may end at once."""
    if any(place.validate_tokens([byte_tokens.ids[byte]]) for byte in (CLOSE_ARRAY, LETTER)):  # a letter: in a string
        return b""
    for end in array_ends:
        if place.validate_tokens([byte_tokens.ids[byte] for byte in end]) == len(end):
            return end
    return b""


def _behind(context: bytes, example: bytes) -> bytes:
    """The byte that stands behind these in the example, if one does."""
    found = example.find(context) if len(context) == CONTEXT else -1
    return example[found + CONTEXT : found + CONTEXT + 1] if found >= 0 else b""


def _nearest(place: Native, byte_tokens: ByteTokens, tried: set[int], likely: bytes) -> bytes:
    """The byte that leads to an end most directly, as JSON is written; none where none may follow."""

    def may_follow(byte: int) -> bool:
        return place.validate_tokens([byte_tokens.ids[byte]]) == 1

    # Inside a string several of these may stand where a quote may, elsewhere at most the bracket that closes.
    if may_follow(QUOTE) and sum(map(may_follow, b",:}]a")) > 1:
        return b'"'
    for byte in STRAIGHT:
        if byte not in tried and may_follow(byte):
            return bytes([byte])
    follow = byte_tokens.in_mask(place.compute_bitmask())
    if likely and likely in follow and likely[0] not in tried:
        return likely
    return bytes(sorted(follow, key=tried.__contains__)[:1])


def _searched(
    matcher: Native,
    byte_tokens: ByteTokens,
    effort: Effort,
    known_end: KnownEnd,
    num_before: int,
    likely: bytes = b"",
    *,
    merges: bool = True,
) -> tuple[bytes | None, bool]:
    """The text, and whether bytes were left out. `likely`: which ones are tried where many may follow; none: all."""
    queue: list[tuple[int, int, bytes, tuple[int, ...], Native]] = [(0, 0, b"", (), matcher)]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    order = 0
    has_pruned = False
    while queue:
        length, _, text, before, place = heapq.heappop(queue)
        if not effort.take(1 + (num_before + length) // COPIED_BYTES):
            break
        end = known_end(place)
        if end is not None:
            return text + end, has_pruned
        mask = place.compute_bitmask()
        masks = (*before[-MASKS_COMPARED:], hash(mask))
        key = (length, masks)
        if place.is_error() or (merges and key in seen):
            continue
        seen.add(key)
        follow = byte_tokens.in_mask(mask)
        if likely and len(follow) > FEW:
            follow = bytes(byte for byte in likely if byte in follow) or follow[:FEW]
            has_pruned = True
        for byte in follow:
            after = place.deep_copy()
            if after.consume_token(byte_tokens.ids[byte]):
                order -= 1  # among equals the latest first: a text is finished before its rivals are begun
                heapq.heappush(queue, (length + 1, order, text + bytes([byte]), masks, after))
    return None, has_pruned


def _text_of_pieces(matcher: LLMatcher, grammar: str, effort: Effort) -> bytes | None:
    """A short text of what the grammar spells out, as of `[^"]* "END"`: where anything may follow all masks are alike,
    and a search by bytes keeps one of a hundred ways."""
    spelled = (_unescaped(run) for run in _SPELLED.findall(grammar))
    pieces = sorted({*spelled, *map(chr, LIKELY)} - {""}, key=lambda piece: (len(piece), piece))
    queue: list[tuple[int, int, int, bytes, LLMatcher]] = [(0, 0, 0, b"", matcher)]
    order = 0
    while queue and effort.take():
        count, _, _, text, place = heapq.heappop(queue)  # the fewest pieces first, of these the shortest text
        if place.is_accepting():
            return text
        for piece in map(str.encode, pieces):
            if place.validate_tokens([*piece]) == len(piece):
                after = place.deep_copy()
                if after.consume_tokens([*piece]):
                    order += 1
                    heapq.heappush(queue, (count + 1, len(text + piece), order, text + piece, after))
    return None


def _unescaped(run: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)) if found[1] or found[2] else found[3], run)


def tried(grammar: str, *, searches: bool, max_items: int = MAX_ITEMS) -> bytes:
    """Build the grammar over single bytes, find a short text if it is wanted, and walk at random: what may hang, hangs
    here.

    Raises:
        ValueError: llguidance refuses it, or no text of it was found.
    """
    matcher = build(grammar, byte_tokenizer(), max_items=max_items)
    text: bytes | None = b""
    if searches:
        # A character beyond ASCII that the text cannot do without stands in the grammar.
        likely = LIKELY + bytes(sorted({byte for byte in grammar.encode() if byte >= 0x80}))
        text = short_text(matcher, SINGLE_BYTES, Effort(SEARCH_EFFORT), likely=likely)
        text = straight_text(matcher, SINGLE_BYTES, Effort(STRAIGHT_BYTES)) if text is None else text
        text = _text_of_pieces(matcher, grammar, Effort(PIECES_EFFORT)) if text is None else text
    rng = random.Random(0)
    for _ in range(TRIAL_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(short_reason(matcher.get_error()))
        follow = SINGLE_BYTES.in_mask(mask)
        if not follow or not matcher.consume_token(rng.choice(follow)):
            break
    if text is None:  # a limit of the engine's that the search met, the walk met too
        reason = short_reason(matcher.get_error()) if matcher.is_error() else "no text that satisfies it was found"
        raise ValueError(reason)
    return text
