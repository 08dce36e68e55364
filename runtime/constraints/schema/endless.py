"""Parts of a grammar that admit no finite text, as an object that must hold another one of its kind: they are left out,
since a text that begins such a part could never end. Reads what `lark.py` writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, TypeAlias

from niwaki.runtime.constraints.schema.document import Json

_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\w+|[|()*+?]|\{\d*,?\d*\}')
_MARK: Final = re.compile(r"[*+?]|\{\d*,?\d*\}")
_MAY_BE_NONE: Final = re.compile(r"[*?]|\{0?,\d*\}")
_RULE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[a-z]\w*')
NOTHING: Final = '""'


class Item(NamedTuple):
    """`name`: of a rule or terminal, or a literal; without one it is a group."""

    name: str
    group: Body
    mark: str


Body: TypeAlias = "list[list[Item]]"  # alternatives, each in order


def all_end(definitions: Mapping[str, Json]) -> bool:
    """Whether surely each of these definitions of a normal schema has a finite value, and so each part that leads to
    them. Most have, and to see it here takes a tenth of the time that reading their rules takes."""
    ending: set[str] = set()
    waiting = [*definitions]
    while waiting:
        left = []
        for name in waiting:
            if _has_end(definitions[name], ending):
                ending.add(name)
            else:
                left.append(name)
        if len(left) == len(waiting):
            return False
        waiting = left
    return True


def _has_end(schema: Json, ending: AbstractSet[str]) -> bool:
    """Whether surely some value of the part is finite, where those of `ending` are."""
    if not isinstance(schema, dict):
        return schema is True
    if isinstance(reference := schema.get("$ref"), str):
        return reference.removeprefix("#/$defs/") in ending
    if isinstance(branches := schema.get("anyOf"), list):
        return any(_has_end(branch, ending) for branch in branches)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "enum" in schema or not {"array", "object"}.issuperset(map(str, kinds)):
        return True
    if "array" in kinds:
        return _has_finite_array(schema, ending)
    properties = _as_dict(schema.get("properties"))
    if schema.keys() & {"minProperties", "x-witness"}:  # which pair it is that must come is not looked into
        values = [*properties.values(), *_as_dict(schema.get("patternProperties")).values()]
        values.append(schema.get("additionalProperties", True))
        return "x-witness" not in schema and all(value is False or _has_end(value, ending) for value in values)
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return all(_has_end(properties.get(str(name), True), ending) for name in names)


def _has_finite_array(schema: dict[str, Json], ending: AbstractSet[str]) -> bool:
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems")
    places = prefix if isinstance(prefix, list) else []
    if "x-automaton" in schema or not isinstance(least, int):
        return False  # not looked into
    wanted = [*places[:least], *([schema.get("items", True)] if least > len(places) else [])]
    return all(_has_end(item, ending) for item in wanted)


def _as_dict(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def without_endless(grammar: str) -> str:
    """The grammar without its endless parts. As it is where it has none, and where it is endless itself."""
    lines = grammar.split("\n")
    texts = _texts_of(lines)
    bodies = {name: _read(iter(_PIECE.findall(texts[name]))) for name in _leading_round(texts)}
    endless = _endless(bodies)
    if not endless or "start" in endless:
        return grammar
    kept: list[str] = []
    for line in lines:
        name = line.partition(": ")[0]
        if name not in endless:
            kept.append(f"{name}: {_written(bodies[name], endless)}" if name in bodies else line)
    return "\n".join(kept)


def bodies_of(grammar: str) -> dict[str, Body]:
    """The rules of a grammar, without its terminals and what only the engine reads."""
    return {name: _read(iter(_PIECE.findall(text))) for name, text in _texts_of(grammar.split("\n")).items()}


def _texts_of(lines: Iterable[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for line in lines:
        name, colon, body = line.partition(": ")
        if colon and not name[0].isupper() and not body.startswith("%"):
            texts[name] = body
    return texts


def _leading_round(texts: dict[str, str]) -> AbstractSet[str]:
    """The rules that hold themselves, and those that lead to such. All others end, and are not read: most do."""
    named = {name: set(_RULE.findall(body)) & texts.keys() for name, body in texts.items()}
    round_: set[str] = set(texts)
    while ends := {name for name in round_ if round_.isdisjoint(named[name])}:
        round_ -= ends
    return round_


def _endless(bodies: dict[str, Body]) -> AbstractSet[str]:
    """The rules of which no text ends."""
    endless = set(bodies)
    while ends := {name for name in endless if any(_ending(bodies[name], endless))}:
        endless -= ends
    return endless


def _ending(body: Body, endless: AbstractSet[str]) -> Iterable[Sequence[Item]]:
    """The alternatives that have texts which end."""
    return (items for items in body if all(_MAY_BE_NONE.fullmatch(item.mark) or _ends(item, endless) for item in items))


def _ends(item: Item, endless: AbstractSet[str]) -> bool:
    return item.name not in endless if item.name else any(_ending(item.group, endless))


def _read(pieces: Iterable[str]) -> Body:
    """Up to the bracket that closes, or to the end."""
    body: Body = [[]]
    for piece in pieces:
        if piece == ")":
            break
        if piece == "|":
            body.append([])
        elif _MARK.fullmatch(piece):
            body[-1][-1] = body[-1][-1]._replace(mark=piece)
        else:
            body[-1].append(Item("", _read(pieces), "") if piece == "(" else Item(piece, [], ""))
    return body


def _written(body: Body, endless: AbstractSet[str]) -> str:
    options: list[str] = []
    for items in _ending(body, endless):
        kept = [item for item in items if _ends(item, endless)]
        options.append(" ".join(_item(item, endless) for item in kept) or NOTHING)
    return " | ".join(dict.fromkeys(options))


def _item(item: Item, endless: AbstractSet[str]) -> str:
    return (item.name or f"({_written(item.group, endless)})") + item.mark
