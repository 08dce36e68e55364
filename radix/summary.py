"""Which prefixes a tree holds, in few bytes: what a router elsewhere needs to know who has a prompt's beginning.

A prefix of whole blocks has a mark of 8 bytes, a hash of its namespace and of all its tokens. Who has the mark of a
prompt's first n blocks has these tokens (but for chance, once in 2**64); who lacks one lacks all behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from heapq import heappop, heappush

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.paths import TokenIds, pack
from niwaki.radix.tree import Node, Root

BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
MARK_BYTES = 8


def marks_of(ids: TokenIds, namespace: str = "", limit: int | None = None) -> list[bytes]:
    """The marks of a prompt's blocks, the first block first; at most `limit`. What is no whole block has none."""
    query = pack(ids if limit is None else ids[: limit * BLOCK_TOKENS])
    return _marks(query, _first(namespace))


def summary_of(roots: Iterable[Root], limit: int) -> list[bytes]:
    """The marks of what trees hold, at most `limit`: what was used last first, no mark before the one it stands on."""
    found: list[bytes] = []
    line: list[tuple[int, int, Node, bytes, bytes]] = []  # by last use, then a serial number: nodes have no order
    serial = 0
    for root in roots:
        heappush(line, (-root.stamp, serial, root, _first(root.namespace), b""))
        serial += 1
    while line and len(found) < limit:
        _, _, node, mark, rest = heappop(line)
        tokens = rest + node.key
        new = _marks(tokens, mark)
        found += new
        rest = tokens[len(new) * BLOCK_BYTES :]
        for child in (node.children or {}).values():
            heappush(line, (-child.stamp, serial, child, new[-1] if new else mark, rest))
            serial += 1
    return found[:limit]


def _first(namespace: str) -> bytes:
    return _hash(namespace.encode())


def _marks(tokens: bytes, mark: bytes) -> list[bytes]:
    """The marks of the whole blocks of `tokens`, which stand behind the prefix of `mark`."""
    marks = []
    for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        mark = _hash(mark + tokens[start : start + BLOCK_BYTES])
        marks.append(mark)
    return marks


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=MARK_BYTES).digest()
