"""Schemas and grammars behind the Matcher protocol: masks, endings within a budget, and the walls around compiling."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
import tracemalloc
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from niwaki.runtime.api import Constraint, ConstraintError, Grammar, JsonSchema, Regex, Spacing
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary

WORDS = [
    b'{"',
    b'":',
    b'","',
    b'"}',
    b'":"',
    b"name",
    b"true",
    b"null",
    b"12",
    b"ab",
    b'"]',
    b"]}",
    b'": ',
    "é".encode(),
]
END = 256 + len(WORDS)
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), *WORDS, None], {END}, size=END + 3)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "kind": {"enum": ["cat", "a very long kind of dog"]},
        "tags": {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {"const": "abcdef"}}, "required": ["a"]},
        },
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
LARK = 'start: "(" item ("," item)* ")"\nitem: /[a-c]{1,3}/ | start\n'
EBNF = 'root ::= "yes" | "no" tail\ntail ::= ("!" | "?")*'


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)  # time limits have a test of their own
    yield compiler
    compiler.close()


def schema(value: object) -> JsonSchema:
    return JsonSchema(json.dumps(value))


def allowed(matcher: Matcher, remaining: int | None = None) -> list[int]:
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    if remaining is None:
        matcher.fill_mask(row)
    else:
        matcher.fill_mask_within(row, remaining)
    tokens = [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
    return tokens if remaining is None else [token for token in tokens if matcher.admits(token, remaining)]


def written(matcher: Matcher, text: str) -> bool:
    """Whether the text may be written byte by byte, and is complete then."""
    place = matcher.clone()
    for byte in text.encode():
        if byte not in allowed(place):
            return False
        place.accept(byte)
    return place.can_end


def drawn(matcher: Matcher, rng: random.Random, budget: int) -> bytes:
    """A random text within the budget."""
    text = b""
    for remaining in range(budget, 0, -1):
        tokens = allowed(matcher)
        token = next(token for token in rng.sample(tokens, len(tokens)) if matcher.admits(token, remaining))
        matcher.accept(token)
        if token == END:
            break
        text += VOCABULARY.token_bytes[token] or b""
    return text


@pytest.mark.parametrize("constraint", [schema(PERSON), schema(TREE), schema({}), Grammar(LARK)], ids=str)
def test_within_any_budget_that_the_shortest_text_fits_the_text_ends_complete(
    constraint: Constraint, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(constraint)
    shortest = compiled.matcher().distance
    rng = random.Random(3)
    for budget in [shortest, shortest, shortest + 1, shortest + 2, shortest + 7, shortest + 30]:
        matcher = compiled.matcher()
        text = drawn(matcher, rng, budget)
        assert matcher.can_end, (budget, text)
        assert written(compiled.matcher(), text.decode())
    short_of = compiled.matcher()
    drawn(short_of, rng, shortest - 1)
    assert not short_of.can_end


def fewest(matcher: Matcher, text: bytes, limit: int, known: dict[tuple[bytes, int], int]) -> int:
    """How many tokens complete the text, tried one after the other; limit + 1 where more than `limit`."""
    if matcher.can_end or limit == 0:
        return 0 if matcher.can_end else 1
    if (text, limit) not in known:
        found = limit + 1
        for token in allowed(matcher):
            place = matcher.clone()
            place.accept(token)
            piece = VOCABULARY.token_bytes[token] or b""
            found = min(found, 1 + fewest(place, text + piece, found - 2, known)) if found > 1 else found
        known[text, limit] = found
    return known[text, limit]


@pytest.mark.parametrize(
    "constraint",
    [
        Grammar(LARK),
        Grammar(EBNF, "ebnf"),
        Grammar('start: a | b\na: "(" a ")" | "a"\nb: "(" b "]]" | "b"\n'),
        schema({"enum": ["abc", "abab", [True, 1], {"a": "12"}]}),
        schema({"type": "array", "items": {"enum": ["ab", 1]}, "maxItems": 3}),
        schema({"type": "string", "pattern": "^[ab]{2,4}$"}),
    ],
    ids=str,
)
def test_a_token_is_admitted_exactly_where_trying_all_texts_finds_an_ending_that_fits(
    constraint: Constraint, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(constraint)
    rng = random.Random(9)
    known: dict[tuple[bytes, int], int] = {}
    answers = set()
    for _ in range(4):
        matcher, text = compiled.matcher(), b""
        while (tokens := [token for token in allowed(matcher) if token != END]) and len(text) < 8:
            remaining = max(1, matcher.distance + rng.randrange(3))
            for token in tokens:
                place = matcher.clone()
                place.accept(token)
                piece = VOCABULARY.token_bytes[token] or b""
                fits = fewest(place, text + piece, remaining - 1, known) < remaining
                assert matcher.admits(token, remaining) == fits, (text, piece, remaining)
                answers.add(fits)
            token = rng.choice(tokens)
            text += VOCABULARY.token_bytes[token] or b""
            matcher.accept(token)
    assert answers == {True, False}


def test_a_key_whose_value_no_longer_fits_is_not_begun(compiler: ConstraintCompiler) -> None:
    """Behind the quote the text may still end soon: by another key."""
    days = {name: {"type": "string", "format": "date"} for name in ("first", "last")}
    wanted = {
        "type": "object",
        "properties": {"days": {"type": "object", "properties": days, "required": [*days]}, "n": {"type": "null"}},
        "required": ["n"],
    }
    compiled = compiler.compile(schema(wanted))
    shortest = compiled.matcher().distance
    for seed in range(60):
        matcher = compiled.matcher()
        text = drawn(matcher, random.Random(seed), shortest + seed)
        assert matcher.can_end, (seed, text)


def test_objects_of_any_keys_end_within_their_budget_however_long_their_values_are(
    compiler: ConstraintCompiler,
) -> None:
    """A value of three fields is begun and has to be finished, which no search over single bytes gets to."""
    point = {
        "type": "object",
        "properties": {**{name: {"type": "number"} for name in "xy"}, "tag": {"type": ["string", "null"]}},
        "required": ["x", "y", "tag"],
        "additionalProperties": False,
    }
    compiled = compiler.compile(schema({"type": "object", "additionalProperties": point}))
    for seed in range(8):
        matcher = compiled.matcher()
        drawn(matcher, random.Random(seed), 60)
        assert matcher.can_end


@pytest.mark.parametrize(
    "wanted",
    [{"items": {"type": "string", "pattern": r"\.tar\.gz$"}}, {"propertyNames": {"pattern": "_id$|é"}}],
    ids=str,
)
def test_what_strings_must_hold_is_written_in_time(wanted: dict[str, object], compiler: ConstraintCompiler) -> None:
    """No shortest text shows what it is: the array and the object may be empty."""
    compiled = compiler.compile(schema({"type": "array" if "items" in wanted else "object", **wanted}))
    for seed in range(16):
        matcher = compiled.matcher()
        text = drawn(matcher, random.Random(seed), 12 + 2 * seed)
        assert matcher.can_end, (seed, text)


def test_the_shortest_ending_completes_the_text_from_everywhere(compiler: ConstraintCompiler) -> None:
    rng = random.Random(5)
    for constraint in (schema(PERSON), schema(TREE), Grammar(LARK)):
        matcher = compiler.compile(constraint).matcher()
        for _ in range(12):
            ending = matcher.shortest_ending(1000)
            assert ending is not None
            assert len(ending) == matcher.distance
            place = matcher.clone()
            for token in ending:
                assert token in allowed(place)
                place.accept(token)
            assert place.can_end
            assert not ending or matcher.shortest_ending(len(ending) - 1) is None
            choices = [token for token in allowed(matcher) if token != END]
            if not choices:
                break
            matcher.accept(rng.choice(choices))


@pytest.mark.parametrize("text", ["cat", "a very long kind of dog"])
def test_a_schema_admits_its_values_written_compactly_and_nothing_else(text: str, compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(schema(PERSON)).matcher()
    assert written(matcher, f'{{"name":"é","kind":"{text}"}}')
    assert written(matcher, f'{{"name":"x","kind":"{text}","tags":[{{"a":"abcdef"}}]}}')
    for wrong in (
        '{"name":"","kind":"cat"}',
        '{"name":"x"}',
        '{"kind":"cat","name":"x"}',
        '{"name": "x","kind":"cat"}',
    ):
        assert not written(matcher, wrong)


@pytest.mark.parametrize(
    ("spacing", "admitted"),
    [("compact", [True, False, False]), ("spaced", [False, True, False]), ("free", [True, True, True])],
)
def test_blanks_stand_in_json_where_the_spacing_says(
    spacing: Spacing, admitted: list[bool], compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps(PERSON), spacing))
    value = {"name": "a,b: {", "kind": "cat", "tags": [{"a": "abcdef"}, {"a": "abcdef"}]}
    texts = [json.dumps(value, separators=(",", ":")), json.dumps(value), json.dumps(value, indent=2)]
    assert [written(compiled.matcher(), text) for text in texts] == admitted
    assert not written(compiled.matcher(), json.dumps(value).replace(" ", "  "))
    for seed in range(4):
        matcher = compiled.matcher()
        drawn(matcher, random.Random(seed), matcher.distance + 1 + 4 * seed)
        assert matcher.can_end


@pytest.mark.parametrize(
    ("wanted", "budget"),
    [
        ({"type": "string", "minLength": 5000}, 1300),
        ({"type": "array", "minItems": 40, "items": {**PERSON, "required": ["name"]}}, 300),
    ],
    ids=["text", "array"],
)
def test_no_question_about_a_long_ending_holds_up_the_engine(
    wanted: object, budget: int, compiler: ConstraintCompiler
) -> None:
    """Once one took 2.9 s of processor time."""
    matcher = compiler.compile(schema(wanted)).matcher()
    assert matcher.distance <= budget
    rng = random.Random(1)
    slowest = 0.0
    for remaining in range(budget, 0, -1):
        tokens = allowed(matcher)
        for _ in range(2):
            token = rng.choice(tokens)
            began = time.process_time()
            is_admitted = matcher.admits(token, remaining)
            slowest = max(slowest, time.process_time() - began)
            if is_admitted:
                break
        else:
            ending = matcher.shortest_ending(remaining)
            assert ending is not None
            token = ending[0] if ending else END
        matcher.accept(token)
        if token == END:
            break
    assert matcher.can_end
    assert slowest < 1, "a few milliseconds where nothing else runs"


def test_a_long_ending_takes_memory_in_proportion_to_its_length() -> None:
    words = GrammarVocabulary(VOCABULARY)
    text = b'"' + b"abc" * 1600 + b'"'
    tracemalloc.start()
    ending = words.ending(text)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 400 * len(text)
    assert b"".join(VOCABULARY.token_bytes[token] or b"" for token in ending.tokens()) == text
    assert ending.num_tokens == len(ending.tokens()) == ending.behind(1).num_tokens + 1


def test_an_unknown_spacing_is_refused(compiler: ConstraintCompiler) -> None:
    with pytest.raises(ConstraintError, match="one of compact, spaced, free, got 'wide'"):
        compiler.compile(JsonSchema("{}", "wide"))  # type: ignore[arg-type]  # what a caller may get wrong


def test_grammars_of_both_syntaxes_admit_their_sentences(compiler: ConstraintCompiler) -> None:
    lark = compiler.compile(Grammar(LARK)).matcher()
    assert [written(lark, text) for text in ("(a,(b,cc))", "()", "(abcd)", "(a")] == [True, False, False, False]
    ebnf = compiler.compile(Grammar(EBNF, "ebnf")).matcher()
    assert [written(ebnf, text) for text in ("yes", "no", "no!?!", "yes!")] == [True, True, True, False]


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (r'root ::= "\u00e9" | [\u0041-\u0043] "\x41\t"', ["é", "BA\t"], ["DA\t", "u00e9"]),
        (r'root ::= "\U0001F600" | [^a\-z^]', ["😀", "b"], ["a", "-", "z", "^"]),
        ('root ::= "a" [c]{0} ("b" root){0,0} "d"', ["ad"], ["acd", "abadd", "a"]),
        ("root ::= [a&&b] [+--] [-x] [y-]", ["&,--", "a+xy"], ["c,--", "a.xy", "aaxy"]),
        ('root ::= "a" . "b"', ["a\nb", "a😀b"], ["ab"]),
        ('root ::= a A a-b a_b\na ::= "1"\nA ::= "2"\na-b ::= "3"\na_b ::= "4"', ["1234"], ["1134", "1244"]),
        ('root ::= start 1 aB\nstart ::= "x" start | "y"\n1 ::= "z"\naB ::= # none\n "b"', ["xxyzb"], ["xzb"]),
        ('root ::= "(?i)a/" "\\\\" "a\nb"', ["(?i)a/\\a\nb"], ["(?i)A/\\a\nb", "a/\\a\nb"]),
    ],
)
def test_an_ebnf_grammar_means_its_characters_and_its_names(
    grammar: str, yes: list[str], no: list[str], compiler: ConstraintCompiler
) -> None:
    matcher = compiler.compile(Grammar(grammar, "ebnf")).matcher()
    assert [written(matcher, text) for text in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


def random_ebnf(draw: random.Random, depth: int, rules: list[str]) -> tuple[str, str]:
    """An expression of EBNF, and the regex of the same texts. Some parts are `rules` of their own."""
    kind = draw.choice(("text", "set", "cat", "or", "repeat", "rule") if depth else ("text", "set"))
    if kind == "text":
        return draw.choice([('"a"', "a"), ('"ab"', "ab"), ('"abc"', "abc"), ('""', "")])
    if kind == "set":
        return draw.choice([("[a-b]", "[ab]"), ("[^a]", "[^a]"), (".", "(?s:.)"), ("[a-z]+", "[a-z]+")])
    first, same = random_ebnf(draw, depth - 1, rules)
    if kind == "repeat":
        sign = draw.choice(["*", "+", "?", "{2}", "{1,2}", "{2,}"])
        return f"({first}){sign}", f"(?:{same}){sign}"
    if kind == "rule":
        rules.append(first)
        return f"r-{len(rules)}", f"(?:{same})"
    then, same_then = random_ebnf(draw, depth - 1, rules)
    return (f"({first} | {then})", f"(?:{same}|{same_then})") if kind == "or" else (f"{first} {then}", same + same_then)


def test_an_ebnf_grammar_has_the_texts_of_its_regex(compiler: ConstraintCompiler) -> None:
    draw = random.Random(2)
    strings = ["".join(s) for n in range(5) for s in product("abc", repeat=n)]
    for _ in range(60):
        rules: list[str] = []
        root, regex = random_ebnf(draw, 4, rules)
        source = "\n".join([f"root ::= {root}", *(f"r-{i} ::= {rule}" for i, rule in enumerate(rules, 1))])
        matcher = compiler.compile(Grammar(source, "ebnf")).matcher()
        assert [s for s in strings if written(matcher, s)] == [s for s in strings if re.fullmatch(regex, s)], source


def test_a_regex_and_the_grammar_of_that_regex_have_the_same_masks(compiler: ConstraintCompiler) -> None:
    rng = random.Random(7)
    for pattern in ("(ab|12)*null", "[a-z]{2,5}(,[0-9]+)?", "name(true)?|n[aeé]+"):
        one, other = (
            compiler.compile(Regex(pattern)).matcher(),
            compiler.compile(Grammar(f"start: /{pattern}/")).matcher(),
        )
        for _ in range(10):
            tokens = allowed(one)
            assert tokens == allowed(other)
            assert one.can_end == other.can_end
            token = rng.choice(tokens)
            if token == END:
                break
            one.accept(token)
            other.accept(token)


def test_a_matcher_goes_back_and_its_clone_goes_on_alone(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(schema({"type": "boolean"})).matcher()
    start = allowed(matcher)
    for byte in b"tru":
        matcher.accept(byte)
    twin = matcher.clone()
    twin.accept(ord("e"))
    twin.accept(END)
    assert (twin.is_done, matcher.is_done, matcher.can_end) == (True, False, False)
    assert allowed(twin) == [END]
    with pytest.raises(ConstraintError, match="token 101 is not allowed by the constraint after 5 tokens"):
        twin.accept(ord("e"))
    twin.rollback(2)
    assert allowed(twin) == allowed(matcher) == [ord("e")]
    assert matcher.forced() == (ord("e"),)
    with pytest.raises(ConstraintError, match="token 97 is not allowed"):
        matcher.accept(ord("a"))
    matcher.rollback(3)
    assert allowed(matcher) == start
    with pytest.raises(ConstraintError, match="cannot take back 1 tokens of 0"):
        matcher.rollback(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON at 1"),
        ("3", "must be an object or a boolean, got int"),
        ('{"minimum": NaN}', "holds NaN"),
        ('{"minimum": 1e999}', "out of range"),
        ('{"minimum": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ('{"const": "\\ud800"}', "a lone surrogate"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"items":' * 100_000, "is too large"),
        ('{"items":' * 1000, "64 levels deep"),
        ('{"type": "string", "pattern": "("}', "cannot be enforced|at /pattern"),
        ("false", "no text|cannot be enforced"),
        ('{"$ref": "#"}', "no text|cannot be enforced|itself"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_the_reason(
    text: str, message: str, compiler: ConstraintCompiler
) -> None:
    with pytest.raises(ConstraintError, match=message):
        compiler.compile(JsonSchema(text))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("start: b\nb: x"), 'in line 2 at 4: unknown name: "x"'),
        (Grammar('start: "a'), "in line 1 at 10: no word of Lark's notation begins or ends here$"),
        (Grammar("start: b\nb: 'a'"), "in line 2 at 4: no word of Lark's .* here; a text stands in double quotes$"),
        (Grammar('start "a"'), "in line 1 at 7: Expected token ':', found \"string...\"$"),
        (
            Grammar('start: "a" b\nb: /[/'),
            "in line 2 at 4: .* regex parse error: unclosed character class$",
        ),
        (Grammar('root ::= "a"'), "in line 1 at 7: .*; rules written name ::= are EBNF: give it as ebnf=$"),
        (Grammar('root: "a"'), "no rule is called 'start', with which a text begins$"),
        (Grammar('start: "a" start'), "no text that satisfies it"),
        (Grammar("start: start"), "no token may follow"),
        (Grammar(""), "at least one rule"),
        (Grammar("start: " + "(" * 1000), "64 levels deep"),
        (Grammar('%llguidance {}\nstart: "a"'), "engine's own options"),
        (Grammar("start: /a/", "ebnf"), "no '::='"),
        (
            Grammar('root ::= "a', "ebnf"),
            "ebnf grammar is not valid in line 1: '\"' does not begin anything, as it is not closed$",
        ),
        (Grammar("root ::= [a", "ebnf"), r"'\[' does not begin anything, as it is not closed$"),
        (Grammar("root ::= 'a'", "ebnf"), "does not begin anything; a text stands in double quotes$"),
        (Grammar('root ::= "a"\nb ::= "b" c', "ebnf"), "in line 2: there is no rule 'c'"),
        (Grammar('root ::= "a"\nroot ::= "b"', "ebnf"), "in line 2: the rule 'root' is defined twice"),
        (Grammar('start ::= "a"', "ebnf"), "its rule 'root', which this one has not"),
        (Grammar(r'root ::= "\q"', "ebnf"), r"unknown escape \\q"),
        (Grammar(r'root ::= "\ud83d"', "ebnf"), r"\\ud83d is no character"),
        (Grammar("root ::= [b-a]", "ebnf"), r"a range of \[b-a\] ends below its start"),
        (Grammar("root ::= []", "ebnf"), "no character is in"),
        (Grammar('root ::= "a" |)', "ebnf"), r"in line 1: '\)' closes nothing"),
        (Grammar('root ::= ("a"\nb ::= "b")', "ebnf"), r"in line 1: '\(' is not closed"),
        (Grammar('root ::= "a"\n\n | * "b"', "ebnf"), r"in line 3: there is nothing that \* could repeat"),
        (Grammar('"a" root ::= "b"', "ebnf"), "a rule begins with its name"),
        (Grammar('start: "a"\0'), "NUL"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_the_reason(
    grammar: Grammar, message: str, compiler: ConstraintCompiler
) -> None:
    with pytest.raises(ConstraintError, match=message):
        compiler.compile(grammar)


def test_what_overflows_a_stack_or_takes_for_ever_harms_nobody() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)} | {"d1500": {"type": "null"}}
    compiler = ConstraintCompiler(VOCABULARY, seconds=1)
    try:
        for hostile in (
            schema({"$ref": "#/$defs/d0", "$defs": chain}),
            schema({"type": "integer", "multipleOf": 999_983}),
            schema({"$ref": "#/$defs/d0", "$defs": {k: {"items": v, "minItems": 1} for k, v in chain.items()}}),
            schema({"$ref": "#/$defs/d1450", "$defs": chain}),
            Grammar("start: /(a?){3000}(b|[a-z]){2000}x{10000}/"),
        ):
            with contextlib.suppress(ConstraintError):  # compiled or refused, either is well
                assert compiler.compile(hostile).matcher().distance > 0
        assert compiler.compile(Grammar('start: "a"')).matcher().distance == 1  # and the next one finds a process
    finally:
        compiler.close()
