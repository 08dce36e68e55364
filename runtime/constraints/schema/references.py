"""Where references lead inside one schema document (2020-12 core, sections 8 and 9; `id` and `definitions` of drafts
4 to 7 too). Nothing is ever fetched."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urldefrag, urljoin

from niwaki.runtime.constraints.schema.document import Json, escaped, refused, unescaped

ROOT_BASE: Final = "https://schema.invalid/"  # never fetched: what references inside the document are joined to
# The values of these are data, not schemas: an `$id` in them names nothing.
DATA_KEYWORDS: Final = frozenset({"enum", "const", "default", "examples", "example"})


class Document:
    """A schema, its nodes by JSON pointer ("" is the root), and its resources and anchors."""

    def __init__(self, root: Json) -> None:
        self._nodes: dict[str, Json] = {"": root}
        self._bases: dict[str, str] = {}
        self._resources: dict[str, str] = {ROOT_BASE: ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, list[str]] = {}
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self.is_old = isinstance(dialect, str) and any(f"draft-0{number}" in dialect for number in (3, 4, 6, 7))
        self._index("", root, ROOT_BASE)

    def node(self, pointer: str) -> Json:
        return self._nodes[pointer]

    def target(self, pointer: str, keyword: str, reference: Json) -> str:
        """The pointer that a `$ref` or `$dynamicRef` in the schema at `pointer` leads to.

        Raises:
            ConstraintError: it leads out of the document, or nowhere.
        """
        place = f"{pointer}/{keyword}"
        if not isinstance(reference, str):
            raise refused(place, f"a reference must be a string, got {reference!r}")
        url, fragment = _joined(self._bases.get(pointer, ROOT_BASE), reference)
        resource = self._resources.get(url)
        if resource is None:
            raise refused(place, f"{reference!r} leads out of the schema, and nothing is fetched; put it under $defs")
        if fragment and not fragment.startswith("/"):
            if keyword == "$dynamicRef" and len(self._dynamic.get(fragment, [])) > 1:
                raise refused(place, f"the anchor {fragment!r} is dynamic and stands at several places")
            found = self._anchors.get((url, unquote(fragment)))
        else:
            found = self._followed(resource, [unescaped(part) for part in unquote(fragment).split("/")[1:]])
        if found is None or not isinstance(self._nodes[found], dict | bool):
            raise refused(place, f"{reference!r} leads to no schema")
        return found

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

    def _index(self, pointer: str, node: Json, base: str) -> None:
        self._nodes[pointer] = node
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._index(f"{pointer}/{index}", item, base)
        if not isinstance(node, dict):
            return
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
        self._bases[pointer] = base
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str):
                self._anchors[base, name] = pointer
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(pointer)
        for key, value in node.items():
            if key not in DATA_KEYWORDS or pointer.endswith(("/properties", "/$defs", "/definitions")):
                self._index(f"{pointer}/{escaped(key)}", value, base)


def _joined(base: str, reference: str) -> tuple[str, str]:
    """The absolute address, and the fragment. A fragment alone stays where it is, whatever the scheme."""
    if reference.startswith("#"):
        return base, reference[1:]
    url, fragment = urldefrag(urljoin(base, reference))
    return url, fragment


def _is_schema_place(pointer: str) -> bool:
    return not pointer.endswith(("/properties", "/$defs", "/definitions", "/patternProperties", "/dependentSchemas"))
