"""Where references lead inside one schema document (2020-12 core, sections 8 and 9; `id` and `definitions` of drafts
4 to 7 too). Nothing is ever fetched."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urldefrag, urljoin

from niwaki.runtime.constraints.schema.document import Json, escaped, refused, unescaped
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


class Document:
    """A schema, its nodes by JSON pointer, and its resources and anchors.

    `root` is the pointer of the whole. Where an anchor is dynamic in several resources, the pointers handed out and
    taken are places in a scope (see `scopes.py`).
    """

    def __init__(self, root: Json) -> None:
        self._nodes: dict[str, Json] = {"": root}
        self._bases: dict[str, str] = {}
        self._targets: dict[tuple[str, str, str], str] = {}  # of references: by base, keyword and text
        self._resources: dict[str, str] = {ROOT_BASE: ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, dict[str, str]] = {}  # resource -> dynamic anchor -> its pointer
        said = str(root.get("$schema")) if isinstance(root, dict) else ""
        dialect = next((name for name in LATER if name in said), "")
        self.is_old = dialect.startswith("draft")
        self.is_2019 = dialect == "2019-09"
        self.is_recursive = not self.is_old and "2020-12" not in said  # it may have $recursiveRef
        self._dialect, self._later = dialect, LATER.get(dialect, frozenset())
        if isinstance(root, dict):
            self._index("", root, ROOT_BASE)
        names = [name for anchors in self._dynamic.values() for name in anchors]
        self._scopes = Scopes(self._dynamic) if len(names) > len(set(names)) else None
        self.root = "" if self._scopes is None else self._scopes.entered((), "", "")

    def node(self, pointer: str) -> Json:
        return self._nodes[plain(pointer) if pointer[:1] == "~" else pointer]

    def check_words(self, pointer: str, schema: dict[str, Json]) -> None:
        """Raises ConstraintError: a keyword that `$schema` does not know. To enforce it would not be what a validator
        does, to leave it out not what was meant."""
        for keyword in schema if self._later else ():
            if keyword in self._later:
                reason = f"{self._dialect} does not know it; name a later $schema, or leave it out"
                raise refused(f"{pointer}/{keyword}", reason)

    def target(self, pointer: str, keyword: str, reference: Json) -> str:
        """The pointer that a `$ref`, `$dynamicRef` or `$recursiveRef` in the schema at `pointer` leads to.

        Raises:
            ConstraintError: it leads out of the document, or nowhere.
        """
        if self._scopes is not None or not isinstance(reference, str):
            return self._found_target(pointer, keyword, reference)
        key = (self._base(pointer), keyword, reference)
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
        url, fragment = _joined(self._base(pointer), reference)
        resource = self._resources.get(url)
        if resource is None:
            raise refused(place, f"{reference!r} leads out of the schema, and nothing is fetched; put it under $defs")
        name = unquote(fragment)
        if name and not name.startswith("/"):
            found = self._anchors.get((url, name))
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
        return self._scopes.entered(bound, self._resources[self._base(found)], found)

    def _base(self, pointer: str) -> str:
        return self._bases.get(plain(pointer) if pointer[:1] == "~" else pointer, ROOT_BASE)

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

    def _index(self, pointer: str, node: list[Json] | dict[str, Json], base: str) -> None:
        nodes = self._nodes
        nodes[pointer] = node
        if isinstance(node, list):
            inner: dict[str, Json] = {str(index): item for index, item in enumerate(node)}
        else:
            inner = node
            if not NAMING.isdisjoint(node):
                base = self._named(pointer, node, base)
            self._bases[pointer] = base
            if not DATA_KEYWORDS.isdisjoint(node) and not pointer.endswith(("/properties", "/$defs", "/definitions")):
                inner = {key: value for key, value in node.items() if key not in DATA_KEYWORDS}
        for key, value in inner.items():
            place = f"{pointer}/{escaped(key)}"
            if isinstance(value, dict) or isinstance(value, list):  # noqa: SIM101  # a union is built anew each time
                self._index(place, value, base)
            else:
                nodes[place] = value

    def _named(self, pointer: str, node: dict[str, Json], base: str) -> str:
        """Note the names that a schema has for itself. Its base from here on."""
        for keyword in ("$id", "id"):
            name = node.get(keyword)
            is_schema_id = isinstance(name, str) and not (self.is_old and "$ref" in node) and _is_schema_place(pointer)
            if isinstance(name, str) and is_schema_id:
                url, fragment = _joined(base, name)
                if fragment:  # drafts 4 to 7 name anchors so
                    self._anchors[url, fragment] = pointer
                if not name.startswith("#") and (keyword == "$id" or self.is_old or pointer == ""):
                    base = url
                    self._resources.setdefault(url, pointer)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str):
                self._anchors[base, name] = pointer
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(self._resources[base], {})[name] = pointer
        if node.get("$recursiveAnchor") is True and self._resources[base] == pointer:
            self._dynamic.setdefault(pointer, {})[RECURSIVE] = pointer
        return base


def _joined(base: str, reference: str) -> tuple[str, str]:
    """The absolute address, and the fragment. A fragment alone stays where it is, whatever the scheme."""
    if reference.startswith("#"):
        return base, reference[1:]
    url, fragment = urldefrag(urljoin(base, reference))
    return url, fragment


def _is_schema_place(pointer: str) -> bool:
    return not pointer.endswith(("/properties", "/$defs", "/definitions", "/patternProperties", "/dependentSchemas"))
