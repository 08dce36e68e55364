"""Token ids as packed bytes, and paths in the tree as tokens and pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from niwaki.radix.tree import Node, Root

TokenIds = npt.NDArray[np.int32]

INT32 = np.dtype(np.int32)  # comparing with a dtype is much quicker than with the scalar type


def demand_token_ids(ids: TokenIds) -> None:
    if not isinstance(ids, ndarray) or ids.dtype != INT32 or ids.ndim != 1:
        raise _not_token_ids(ids)


def pack(ids: TokenIds) -> bytes:
    """Tokens as bytes in memory order, 4 each."""
    if not isinstance(ids, ndarray) or ids.dtype != INT32 or ids.ndim != 1:  # `demand_token_ids`, without a call
        raise _not_token_ids(ids)
    return ids.tobytes()


def _not_token_ids(ids: object) -> TypeError:
    shown = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, ndarray) else type(ids).__name__
    return TypeError(f"token ids must be a NumPy array of int32 with one dimension, got {shown}")


def path_pages(node: Node) -> list[int]:
    """The pages from the root down to the end of `node`."""
    parts: list[list[int]] = []
    step: Node | None = node
    while step is not None:
        parts.append(step.pages)
        step = step.parent
    pages: list[int] = []
    for part in reversed(parts):
        pages += part
    return pages


def path_key(node: Node) -> tuple[str, bytes]:
    """The namespace of a node and all tokens from the root down to its end, packed."""
    parts: list[bytes] = []
    step = node
    while step.parent is not None:
        parts.append(step.key)
        step = step.parent
    assert isinstance(step, Root)
    return step.namespace, b"".join(reversed(parts))
