"""Constants as a grammar writes them; of many that are arrays or objects, what they begin and end with alike once.

Each constant is the pieces that the rules of arrays and objects are written in, too, since the lexer takes the longest
piece. Of many, the pieces that lead from one place to another are edges of an automaton without circles, as small as
can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Final, NamedTuple

from niwaki.runtime.constraints.schema.document import Json, json_text

MAX_EDGES: Final = 12_000
END: Final = 0  # the place behind every constant: none is the beginning of another


class Piece(NamedTuple):
    text: str
    is_value: bool  # no bracket, comma, colon or key: several of them may be one terminal


Edges = dict[Piece, int]  # where each piece leads


def literal(text: str) -> str:
    """The text as a literal of Lark."""
    return encode_basestring(text).replace("\x7f", "\\x7f")


def constant(value: Json) -> str:
    """One constant alone."""
    if isinstance(value, list):
        items = '","'.join(map(constant, value))
        return f'"["{items}"]"'
    if isinstance(value, dict):
        pairs = '","'.join(f'{literal(json_text(name))}":"{constant(item)}' for name, item in value.items())
        return f'"{{"{pairs}"}}"'
    return literal(json_text(value))


def pieces_of(value: Json) -> list[Piece]:
    found: list[Piece] = []
    _add_pieces(value, found)
    return found


def _add_pieces(value: Json, found: list[Piece]) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            found.append(Piece("," if index else "[", False))
            _add_pieces(item, found)
        found += [Piece("]", False)] if value else [Piece("[", False), Piece("]", False)]
    elif isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            found += [Piece("," if index else "{", False), Piece(json_text(name), False), Piece(":", False)]
            _add_pieces(item, found)
        found += [Piece("}", False)] if value else [Piece("{", False), Piece("}", False)]
    else:
        found.append(Piece(json_text(value), True))


def automaton_of(values: Sequence[Json]) -> list[Edges]:
    """The edges of each place, those that they lead to first; the last place is the start, the first is END."""
    tree: list[Edges] = [{}]
    for value in values:
        place = 0
        *before, last = pieces_of(value)
        for piece in before:
            behind = tree[place].get(piece)
            if behind is None:
                behind = tree[place][piece] = len(tree)
                tree.append({})
            place = behind
        tree[place][last] = END
    # A node comes before those behind it. From the last on, each becomes the place that has just its edges.
    places: list[Edges] = [{}]
    known: dict[tuple[tuple[Piece, int], ...], int] = {}
    merged = [END] * len(tree)
    for number in range(len(tree) - 1, -1, -1):
        edges = {piece: merged[behind] for piece, behind in tree[number].items()}
        key = tuple(edges.items())
        if key not in known:
            known[key] = len(places)
            places.append(edges)
        merged[number] = known[key]
    return places


def are_too_many(values: Sequence[Json]) -> bool:
    """Whether so many places and pieces would take too long to compile."""
    compound = [value for value in values if isinstance(value, list | dict)]
    if sum(map(len, map(pieces_of, compound))) <= MAX_EDGES:
        return False
    # As `written` writes them: values that lead to one place are one terminal.
    edges = (
        {(behind, piece.is_value or piece.text) for piece, behind in found.items()} for found in automaton_of(compound)
    )
    return sum(map(len, edges)) > MAX_EDGES


def beside(one: str, other: str) -> str:
    """One behind the other, with a blank where a name would be read together with what stands before it. Others cost a
    tenth of the time in which the engine reads a large grammar."""
    return f"{one} {other}" if other[:1].isalpha() and one[-1:] not in '")' else one + other


def written(values: Sequence[Json], rule: Callable[[list[str]], str], terminal: Callable[[str], str]) -> list[str]:
    """The alternatives at the start. `rule` and `terminal` write alternatives and a terminal, and give its name."""
    places = automaton_of(values)
    parents = [0] * len(places)
    for edges in places:
        for behind in set(edges.values()):
            parents[behind] += 1
    texts = [""] * len(places)
    options: list[str] = []
    for number, edges in enumerate(places[1:], 1):
        heads: dict[tuple[int, bool], list[str]] = {}
        for piece, behind in edges.items():
            heads.setdefault((behind, piece.is_value), []).append(literal(piece.text))
        options = []
        for (behind, is_value), found in heads.items():
            together = [terminal("|".join(found))] if is_value and len(found) > 1 else found
            options += [beside(head, texts[behind]) for head in together]
        is_short = len(options) == 1 and (parents[number] == 1 or len(options[0]) < 12)
        if number < len(places) - 1:
            texts[number] = options[0] if is_short else rule(options)
    return options
