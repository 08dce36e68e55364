"""The radix tree as people look at it: plain data with texts, from an engine here or from a server's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from niwaki.runtime.api import ConfigError

if TYPE_CHECKING:
    from niwaki.radix.outline import OutlineNode
    from niwaki.runtime.checkpoint.tokenizer import Tokenizer

State: TypeAlias = Literal["locked", "pinned", "idle"]

DEFAULT_NODES = 200  # that are shown


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One node. `text` is that of its first tokens; `parent` the place of its parent among the nodes.

    `num_locks`: requests that end in it, and children that are locked. `hits`: lookups that went through it or ended in
    it. `age`: how many of the cache's lookups and commits came after its last use.
    """

    parent: int | None
    text: str
    is_cut: bool
    num_tokens: int
    num_pages: int
    num_children: int
    num_locks: int
    is_pinned: bool
    hits: int
    age: int
    tier: str

    @classmethod
    def of(cls, node: OutlineNode, tokenizer: Tokenizer) -> Self:
        is_cut = len(node.token_ids) < node.num_tokens
        pieces = (
            tokenizer.bytes_of(token_id) or tokenizer.token_text(token_id).encode() for token_id in node.token_ids
        )
        text = b"".join(pieces).decode("utf-8", "replace")
        return cls(
            parent=None if node.parent < 0 else node.parent,
            text=text.rstrip("\ufffd") if is_cut else text,  # a character may be cut, too
            is_cut=is_cut,
            num_tokens=node.num_tokens,
            num_pages=node.num_pages,
            num_children=node.num_children,
            num_locks=node.num_locks,
            is_pinned=node.is_pinned,
            hits=node.hits,
            age=node.age,
            tier=node.tier,
        )

    @property
    def state(self) -> State:
        """locked: a request runs on it; pinned: a program stands on it; idle: it is kept in case somebody asks."""
        return "locked" if self.num_locks else "pinned" if self.is_pinned else "idle"


@dataclass(frozen=True, slots=True)
class Place:
    """A node in its line: `guides` says for each of its ancestors below the root, and then for itself, whether another
    child of the same parent comes after it."""

    index: int
    node: TreeNode
    guides: tuple[bool, ...]
    num_left_out: int  # of its children


@dataclass(frozen=True, slots=True)
class TreeView:
    """A tree at one moment: some of its nodes, parents before children, and the engine's numbers."""

    model: str
    nodes: Sequence[TreeNode]
    usage: Mapping[str, float]

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Self:
        """What `GET /debug/tree` answers. Raises ConfigError where it is something else."""
        names = {field.name for field in fields(TreeNode)}
        model, nodes, usage = found.get("model"), found.get("nodes"), found.get("usage")
        if not isinstance(model, str) or not isinstance(nodes, list) or not isinstance(usage, dict):
            raise ConfigError("what answers is no niwaki server, or one of another version")
        if not all(isinstance(node, dict) and names <= node.keys() for node in nodes):
            raise ConfigError("the server is of another version: its tree says other things")
        return cls(model, [TreeNode(**{name: node[name] for name in names}) for node in nodes], usage)

    def places(self) -> Iterator[Place]:
        """The nodes from the root down, each followed by its children."""
        children: dict[int | None, list[int]] = {}
        for index, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(index)
        waiting: list[tuple[int, tuple[bool, ...]]] = []
        waiting += [(index, (place > 0,)) for place, index in enumerate(reversed(children.get(None, [])))]
        while waiting:
            index, guides = waiting.pop()
            node, below = self.nodes[index], children.get(index, [])
            yield Place(index, node, guides, node.num_children - len(below))
            waiting += [(child, (*guides, place > 0)) for place, child in enumerate(reversed(below))]

    @property
    def num_tokens(self) -> int:
        return sum(node.num_tokens for node in self.nodes)

    @property
    def pages(self) -> Mapping[str, int]:
        """Where the pool's pages are."""
        return {name: int(self.usage.get(f"pages_{name}", 0)) for name in ("held", "tree", "free")}

    @property
    def tiers(self) -> Mapping[str, int]:
        """Pages in each tier below the pool that the engine has."""
        found = ((name.removeprefix("tier_"), count) for name, count in self.usage.items() if name.startswith("tier_"))
        return {name.removesuffix("_pages"): int(count) for name, count in found if name.endswith("_pages")}

    @property
    def hit_rate(self) -> float | None:
        """The share of all prompt tokens that were not computed; None before the first prompt."""
        cached = self.usage.get("cached_tokens", 0)
        asked = cached + self.usage.get("prefilled_tokens", 0)
        return cached / asked if asked else None
