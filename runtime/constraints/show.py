"""What a constraint in a file means, in words: the normal form, examples, what is refused and where, its size.

`niwaki constraint show FILE` prints it. A file that holds a JSON object or boolean is a schema, one with a rule `root`
of EBNF or `start` of Lark a grammar, one line of anything else a regex.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from niwaki.runtime.api import ConfigError, ConstraintError, Grammar, JsonSchema, Regex
from niwaki.runtime.constraints.pattern import parse
from niwaki.runtime.constraints.process import CompilePool
from niwaki.runtime.constraints.regex_automaton import CharacterAutomaton, automaton_of
from niwaki.runtime.constraints.regex_language import Languages, TooManyTerms
from niwaki.runtime.constraints.regex_meaning import found_in, matched_by
from niwaki.runtime.constraints.regex_parser import parsed
from niwaki.runtime.constraints.schema import TookTooLong, examples, normalise
from niwaki.runtime.constraints.schema.document import Json, unescaped
from niwaki.runtime.constraints.schema.lark import lark_of
from niwaki.runtime.constraints.sources import MAX_COST, named, quick_source, read_answer, request_for, too_complex

COMPILE_SECONDS: Final = 1.0  # as an engine gives it
LETTER: Final = b"a"  # for texts of a least length
MAX_FILE_BYTES: Final = 1024 * 1024
MAX_REFUSALS: Final = 20
MAX_LISTED: Final = 12  # texts of a finite language
MAX_DRAWN: Final = 60  # states
_EBNF_RULE: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_LARK_START: Final = re.compile(r"^[?!]?start\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shown:
    """What there is to print, whether the constraint is enforced, and its automaton where it is small."""

    lines: tuple[str, ...]
    is_enforced: bool
    automaton: CharacterAutomaton | None


def show(path: Path) -> Shown:
    """Describe the constraint in a file.

    Raises:
        ConfigError: the file holds no schema, no grammar and no regex.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes: it is no schema and no regex")
    try:
        text = path.read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, at byte {error.start}: it is no schema and no regex") from None
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _EBNF_RULE.search(text):
            return _grammar(Grammar(text, "ebnf"))
        if _LARK_START.search(text):
            return _grammar(Grammar(text))
        if path.suffix == ".json" or "\n" in text or not text:
            raise ConfigError(
                f"{path} is neither a JSON schema ({error}) nor a grammar with a rule root ::= or start: nor a regex, "
                "which is one line"
            ) from None
        return _regex(text)
    if isinstance(value, dict | bool):
        return _schema(text)
    if path.suffix == ".json":
        raise ConfigError(f"{path} holds the JSON value {text[:40]}; a schema is an object or a boolean")
    return _regex(text)


def _schema(text: str) -> Shown:
    refusals = list(_refusals(text))
    if refusals:
        return Shown(("A JSON schema that is refused:", *(f"  {refusal}" for refusal in refusals)), False, None)
    if (refusal := _refusal(JsonSchema(text))) is not None:
        return Shown(("A JSON schema that is refused:", f"  {refusal}"), False, None)
    normal = normalise(text)
    grammar = lark_of(normal.schema)
    small, full = examples(normal.schema)
    lines = ["A JSON schema, enforced. Normal form:"]
    lines += [f"  {line}" for line in json.dumps(normal.schema, indent=2, ensure_ascii=False).splitlines()]
    lines.append(f"Shortest instance: {small}")
    if full != small:
        lines.append(f"A fuller one:      {full}")
    rules = [line for line in grammar.splitlines() if line]
    terminals = sum(line.split(":")[0].isupper() for line in rules)
    sizes = (
        _counted(len(rules) - terminals, "rule"),
        _counted(terminals, "terminal"),
        _counted(len(grammar), "character"),
    )
    lines.append(f"Grammar: {', '.join(sizes)}")
    return Shown(tuple(lines), True, _automaton_of_schema(normal.schema))


def _grammar(grammar: Grammar) -> Shown:
    what = "A grammar in EBNF" if grammar.syntax == "ebnf" else "A grammar in Lark's syntax"
    if (refusal := _refusal(grammar)) is not None:
        return Shown((f"{what} that is refused:", f"  {refusal}"), False, None)
    return Shown((f"{what}, enforced.",), True, None)


def _refusal(constraint: JsonSchema | Regex | Grammar) -> str | None:
    """Why an engine would refuse it, found as an engine finds it."""
    pool = CompilePool(COMPILE_SECONDS, 1)
    try:
        if quick_source(constraint, COMPILE_SECONDS, LETTER) is None:
            read_answer(pool.ask(request_for(constraint, LETTER)))
    except TookTooLong as error:
        return str(too_complex(constraint, COMPILE_SECONDS, error))
    except ConstraintError as error:
        return str(error)
    finally:
        pool.close()
    return None


def _refusals(text: str) -> Iterator[str]:
    """Every refusal: the keyword of each is taken out to find the next one."""
    for _ in range(MAX_REFUSALS):
        try:
            normalise(text)
        except TookTooLong:
            yield "the schema is too complex to work out within 10 s; simplify it"
            return
        except ConstraintError as error:
            yield str(error)
            shorter = _without(text, str(error))
            if shorter is None:
                return
            text = shorter
        else:
            return


def _without(text: str, refusal: str) -> str | None:
    place = re.match(r"schema at (/\S*): ", refusal)
    if place is None:
        return None
    schema = node = json.loads(text)
    *path, last = [unescaped(part) for part in place[1].split("/")[1:]]
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        return None
    del node[last]
    return json.dumps(schema)


def _regex(text: str) -> Shown:
    try:
        pattern = parse(text)
    except ConstraintError as error:
        return Shown(("A regex that is refused:", f"  {error}"), False, None)
    if (refusal := _refusal(Regex(text))) is not None:
        return Shown(("A regex that is refused:", f"  {refusal}"), False, None)
    languages = Languages()
    lines = ["A regex, enforced as a whole match."]
    automaton = None
    try:
        term = matched_by(languages, parsed(text), text)
        shortest = languages.shortest(term)
        if shortest is None:
            return Shown(("A regex that is refused:", f"  {named(Regex(text))} matches no text"), False, None)
        lines.append(f"Shortest text: {shortest!r}")
        members = languages.members(term, MAX_LISTED)
        if members is not None:
            head = "Its only text" if len(members) == 1 else f"All {len(members)} texts"
            lines.append(f"{head}: {', '.join(map(repr, members))}")
        automaton = automaton_of(languages, term, MAX_DRAWN)
    except (ConstraintError, TooManyTerms):
        lines.append("Its characters are not known one by one, or they are very many: no example.")
    if automaton is not None:
        states, edges = _counted(automaton.num_states, "state"), _counted(len(automaton.edges), "edge")
        lines.append(f"Automaton over characters: {states}, {edges}")
    else:
        lines.append(f"Automaton over characters: more than {MAX_DRAWN} states")
    kind = "provably small" if pattern.is_harmless else "may grow: it is compiled in a process of its own"
    if pattern.cost > MAX_COST:
        kind = "more than an automaton may have: llguidance works them out as texts come to them"
    states = _counted(pattern.cost, "state")
    lines.append(f"Automaton over bytes: about {states} before it is made deterministic; {kind}")
    return Shown(tuple(lines), True, automaton)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _automaton_of_schema(schema: Json) -> CharacterAutomaton | None:
    """Of a schema of strings only, the automaton of these strings."""
    languages = Languages()
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum")
    try:
        if isinstance(values, list):
            texts = [value for value in values if isinstance(value, str)]
            if len(texts) == len(values):
                return automaton_of(languages, languages.any_of(map(languages.text, texts)), MAX_DRAWN)
        elif schema.get("type") == "string" and isinstance(pattern := schema.get("pattern"), str):
            return automaton_of(languages, found_in(languages, parsed(pattern), pattern), MAX_DRAWN)
    except (ConstraintError, TooManyTerms):
        pass
    return None
