"""The vocabulary as bytes: which token stands for which bytes, as a trie that masks are walked over.

Built once per tokenizer, never changed, shared by every constraint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from niwaki.runtime.api import ConfigError
from niwaki.runtime.constraints import kernels


class Vocabulary:
    """The bytes of every token, and the ids that end a text.

    token_bytes[i] is what token i writes; None for a special token, which no constraint ever allows. A token of no
    bytes is never allowed either (it would not move the text on). `size` is the width of the logits, which may
    exceed len(token_bytes); the ids above it are never allowed. `marks` are the special tokens by their text: what a
    model puts around calls and reasoning may be one.

    Raises:
        ConfigError: an end id, or a token, outside `size`.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        eos_ids: Collection[int],
        size: int | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> None:
        self.token_bytes = tuple(token_bytes)
        self.eos_ids = frozenset(eos_ids)
        self.marks = dict(marks or {})
        self.size = len(self.token_bytes) if size is None else size
        if self.size < len(self.token_bytes):
            raise ConfigError(f"vocabulary size {self.size} is below its {len(self.token_bytes)} tokens")
        for token_id in self.eos_ids:
            if not 0 <= token_id < self.size:
                raise ConfigError(f"end token {token_id} is outside the vocabulary of {self.size}")
        self.num_words = (self.size + 31) // 32

        ids_of: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.token_bytes):
            if text and token_id not in self.eos_ids:
                ids_of.setdefault(text, []).append(token_id)
        texts = self.sorted_texts = sorted(ids_of)  # each once, though several tokens may write it
        data, offsets = concatenated(texts)
        # Depth-first arrays, see kernels.trie_from_sorted.
        self.node_bytes = np.empty(len(data), np.uint8)
        self.node_depths = np.empty(len(data), np.int32)
        self.node_skips = np.empty(len(data), np.int32)
        text_nodes = self._text_nodes = np.empty(len(texts), np.int32)
        count = kernels.trie_from_sorted(data, offsets, self.node_bytes, self.node_depths, self.node_skips, text_nodes)
        self.node_bytes = self.node_bytes[:count].copy()
        self.node_depths = self.node_depths[:count].copy()
        self.node_skips = self.node_skips[:count].copy()
        self.roots = np.full(256, -1, np.int32)  # the node of each first byte, -1 where no token begins with it
        node = 0
        while node < count:
            self.roots[self.node_bytes[node]] = node
            node = int(self.node_skips[node])
        # Tokens that end at node n: tokens[node_tokens[n]:node_tokens[n + 1]]. In sorted order nodes ascend too.
        per_node = np.zeros(count + 1, np.int64)
        per_node[text_nodes + 1] = [len(ids_of[text]) for text in texts]
        self.node_tokens = np.cumsum(per_node)
        self.tokens = np.array([i for text in texts for i in ids_of[text]], np.int32)
        self.max_token_bytes = max(map(len, texts), default=0)
        self.has_every_byte = all(bytes([b]) in ids_of for b in range(256))
        self.eos_words = np.zeros(self.num_words, np.uint32)  # the mask of the end tokens alone
        for token_id in self.eos_ids:
            self.eos_words[token_id >> 5] |= np.uint32(1) << np.uint32(token_id & 31)

    def subtree(self, text: bytes) -> tuple[int, int] | None:
        """The trie's nodes below that of `text`, from and to: every token that begins with it and goes on. None where
        no token begins with it."""
        first = bisect_left(self.sorted_texts, text)
        if first == len(self.sorted_texts) or not self.sorted_texts[first].startswith(text):
            return None
        # The first text made all the nodes of the prefix, one after the other.
        node = int(self._text_nodes[first]) - (len(self.sorted_texts[first]) - len(text))
        return node + 1, int(self.node_skips[node])

    def tokens_in(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """The tokens that end at the nodes from `first` to before `last`."""
        return self.tokens[self.node_tokens[first] : self.node_tokens[last]]

    def bytes_of(self, token_id: int) -> bytes | None:
        """What the token writes, or None where it writes nothing or does not exist."""
        if not 0 <= token_id < len(self.token_bytes) or token_id in self.eos_ids:
            return None
        return self.token_bytes[token_id] or None


def concatenated(texts: Sequence[bytes]) -> tuple[kernels.Bytes, kernels.Longs]:
    """All texts in one array, and where each starts (one entry more than texts)."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return np.frombuffer(b"".join(texts), np.uint8), offsets
