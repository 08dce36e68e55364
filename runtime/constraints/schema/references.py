"""Where references lead inside one schema document (2020-12 core, sections 8 and 9; `id` and `definitions` of drafts
4 to 7 too). Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from niwaki.runtime.constraints.schema.document import Json, escaped, identity, refused, unescaped
from niwaki.runtime.constraints.schema.scopes import Scopes, plain

ROOT_BASE: Final = "https://schema.invalid/"  # never fetched: what references inside the document are joined to
# The values of these are data, not schemas: an `$id` in them names nothing.
DATA_KEYWORDS: Final = frozenset({"enum", "const", "default", "examples", "example"})
NAMING: Final = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
RECURSIVE: Final = "#"  # 2019-09's one dynamic anchor, under a name that no other can have
# What `$schema` holds, and the words that came later: under it they would say nothing.
SINCE_2020: Final = frozenset({"prefixItems", "$dynamicRef"})
SINCE_2019: Final = SINCE_2020 | {
    "dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
SINCE_7: Final = SINCE_2019 | {"if"}
SINCE_6: Final = SINCE_7 | {"const", "contains", "propertyNames"}
LATER: Final = {
    "draft-03": SINCE_6, "draft-04": SINCE_6, "draft-06": SINCE_7, "draft-07": SINCE_2019, "2019-09": SINCE_2020,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a `$schema` says about the words of its schema."""

    name: str
    is_old: bool  # up to draft 7
    naming: str  # the word that makes a part a resource
    is_2019: bool
    is_recursive: bool  # it may have $recursiveRef
    later: frozenset[str]  # words that it does not know


class _Base(NamedTuple):
    """Of a place: what references there are joined to, the pointer of the resource that it is in, and that one's
    dialect."""

    url: str
    resource: str
    dialect: Dialect


class Document:
    """A schema, its objects and lists by JSON pointer, and its resources and anchors.

    A resource (core 4.3.5) is a schema with an `$id`, or the whole: `#` leads to it from inside, its anchors are its
    own, and its `$schema` is for it alone. `root` is the pointer of the whole. Where an anchor is dynamic in several
    resources, the pointers handed out and taken are places in a scope (see `scopes.py`).
    """

    def __init__(self, root: Json) -> None:
        self._nodes: dict[str, Json] = {"": root}
        whole = _Base(ROOT_BASE, "", dialect_of(root))
        self._bases: dict[str, _Base] = {"": whole}
        self._targets: dict[tuple[str, str, str], str] = {}  # of references: by resource, keyword and text
        self._resources: dict[str, str | None] = {ROOT_BASE: ""}  # by address; None: of two that differ
        self._anchors: dict[tuple[str, str], str | None] = {}  # by resource and name; None: of two
        self._dynamic: dict[str, dict[str, str]] = {}  # resource -> dynamic anchor -> its pointer
        if isinstance(root, dict):
            self._index("", root, whole)
        names = [name for anchors in self._dynamic.values() for name in anchors]
        self._scopes = Scopes(self._dynamic) if len(names) > len(set(names)) else None
        self.root = "" if self._scopes is None else self._scopes.entered((), "", "")

    def node(self, pointer: str) -> Json:
        place = plain(pointer) if pointer[:1] == "~" else pointer
        try:
            return self._nodes[place]
        except KeyError:  # neither an object nor a list
            holder, _, name = place.rpartition("/")
            inside = self._nodes[holder]
            return inside[int(name)] if isinstance(inside, list) else _as_dict(inside)[unescaped(name)]

    def dialect(self, pointer: str) -> Dialect:
        """That of an object of the document."""
        return self._base(pointer).dialect

    def check_words(self, pointer: str, schema: dict[str, Json]) -> None:
        """Raises ConstraintError: a keyword that `$schema` does not know. To enforce it would not be what a validator
        does, to leave it out not what was meant."""
        dialect = self.dialect(pointer)
        for keyword in schema if dialect.later else ():
            if keyword in dialect.later:
                reason = f"{dialect.name} does not know it; name a later $schema, or leave it out"
                raise refused(f"{pointer}/{keyword}", reason)

    def target(self, pointer: str, keyword: str, reference: Json) -> str:
        """The pointer that a `$ref`, `$dynamicRef` or `$recursiveRef` in the schema at `pointer` leads to.

        Raises:
            ConstraintError: it leads out of the document, nowhere, or to one of two.
        """
        if self._scopes is not None or not isinstance(reference, str):
            return self._found_target(pointer, keyword, reference)
        key = (self._base(pointer).resource, keyword, reference)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = self._found_target(pointer, keyword, reference)
        return known

    def _found_target(self, pointer: str, keyword: str, reference: Json) -> str:
        place = f"{pointer}/{keyword}"
        if not isinstance(reference, str):
            raise refused(place, f"a reference must be a string, got {reference!r}")
        if keyword == "$recursiveRef" and reference != "#":
            raise refused(place, f"must be '#', got {reference!r}")
        base = self._base(pointer)
        url, fragment = _joined(base.url, reference)
        if url != base.url and url not in self._resources:
            raise refused(place, f"{reference!r} leads out of the schema, and nothing is fetched; put it under $defs")
        resource = base.resource if url == base.url else self._resources[url]
        if resource is None:
            raise refused(place, f"two schemas that differ have the $id of {reference!r}; give each its own")
        name = unquote(fragment)
        if name and not name.startswith("/"):
            found = self._anchors.get((resource, name))
            if found is None and (resource, name) in self._anchors:
                raise refused(place, f"two schemas have the name of {reference!r}; give each its own")
        else:
            found = self._followed(resource, [unescaped(part) for part in name.split("/")[1:]])
        if found is None or not isinstance(self._nodes[found], dict | bool):
            raise refused(place, f"{reference!r} leads to no schema")
        if self._scopes is None:
            return found
        bound = self._scopes.bound(pointer)
        anchor = RECURSIVE if keyword == "$recursiveRef" else name
        if keyword != "$ref" and self._dynamic.get(resource, {}).get(anchor) == found:
            found = dict(bound).get(anchor, found)  # core 8.2.3.2: the outermost resource that has the anchor
        return self._scopes.entered(bound, self._base(found).resource, found)

    def _base(self, pointer: str) -> _Base:
        return self._bases.get(plain(pointer) if pointer[:1] == "~" else pointer) or self._bases[""]

    def _followed(self, pointer: str, path: list[str]) -> str | None:
        node = self._nodes[pointer]
        for part in path:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
            pointer = f"{pointer}/{escaped(part)}"
            self._nodes.setdefault(pointer, node)
        return pointer

    def _index(self, pointer: str, node: list[Json] | dict[str, Json], base: _Base) -> None:
        self._nodes[pointer] = node
        if isinstance(node, list):
            inner: Iterable[tuple[str, Json]] = ((str(index), value) for index, value in enumerate(node))
        else:
            inner = node.items()
            if not NAMING.isdisjoint(node):
                base = self._named(pointer, node, base)
            if base is not self._bases[""]:
                self._bases[pointer] = base
            if not DATA_KEYWORDS.isdisjoint(node) and not pointer.endswith(("/properties", "/$defs", "/definitions")):
                inner = [(key, value) for key, value in inner if key not in DATA_KEYWORDS]
        for key, value in inner:
            if type(value) is dict or type(value) is list:  # of two texts in three nothing more is asked
                self._index(f"{pointer}/{escaped(key)}", value, base)

    def _named(self, pointer: str, node: dict[str, Json], base: _Base) -> _Base:
        """Note the names that a schema has for itself. Its base from here on.

        Which word is a name the dialect around it says: in 2020-12 an `id` makes no resource, and a `$schema` beside it
        says nothing (core 8.1.1).
        """
        around = base.dialect
        dialect = dialect_of(node) if isinstance(node.get("$schema"), str) else around
        for keyword in ("$id", "id"):
            name = node.get(keyword)
            if not isinstance(name, str) or (around.is_old and "$ref" in node) or not _is_schema_place(pointer):
                continue
            if keyword != around.naming and pointer != base.resource:
                continue
            url, fragment = _joined(base.url, name)
            if not name.startswith("#"):
                base = _Base(url, pointer, dialect)
                known = self._resources.setdefault(url, pointer)
                if known is not None and known != pointer and identity(self._nodes[known]) != identity(node):
                    self._resources[url] = None
            if fragment:  # drafts 4 to 7 name anchors so
                self._name(base.resource, fragment, pointer)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str):
                self._name(base.resource, name, pointer)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(base.resource, {})[name] = pointer
        if node.get("$recursiveAnchor") is True and base.resource == pointer:
            self._dynamic.setdefault(pointer, {})[RECURSIVE] = pointer
        return base

    def _name(self, resource: str, anchor: str, pointer: str) -> None:
        if self._anchors.setdefault((resource, anchor), pointer) != pointer:
            self._anchors[resource, anchor] = None


def dialect_of(schema: Json) -> Dialect:
    """That which a schema names in `$schema`: 2019-09 and 2020-12 together, where it names none."""
    said = str(schema.get("$schema")) if isinstance(schema, dict) else ""
    name = next((name for name in LATER if name in said), "")
    is_old = name.startswith("draft")
    is_recursive = not is_old and "2020-12" not in said
    naming = "id" if name in ("draft-03", "draft-04") else "$id"
    return Dialect(name, is_old, naming, name == "2019-09", is_recursive, LATER.get(name, frozenset()))


def _as_dict(node: Json) -> dict[str, Json]:
    assert isinstance(node, dict), "what a pointer leads into"
    return node


def _joined(base: str, reference: str) -> tuple[str, str]:
    """The absolute address, and the fragment. A fragment alone stays where it is, whatever the scheme."""
    if reference.startswith("#"):
        return base, reference[1:]
    url, fragment = urldefrag(urljoin(base, reference))
    return url, fragment


def _is_schema_place(pointer: str) -> bool:
    return not pointer.endswith(("/properties", "/$defs", "/definitions", "/patternProperties", "/dependentSchemas"))
