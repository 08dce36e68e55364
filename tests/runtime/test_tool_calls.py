"""Calls and reasoning: what the masks let through is what the reader takes apart, in every format, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from niwaki.runtime.api import (
    CallFormat,
    Choices,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    Tool,
    ToolCalls,
)
from niwaki.runtime.api.calls import HERMES, LLAMA3, MISTRAL, NIWAKI, AnswerReader, answer_of, format_of, read_answer
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary

END, CALL, CALL_END, LIST = 256, 257, 258, 259
MARKS = {"<|call|>": CALL, "<|/call|>": CALL_END, "[TOOL_CALLS]": LIST}
WORDS = (b'{"name":"', b'":{"', b"add", b"</tool", b"_call>", b"<tool_call>", b'"}')
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), None, None, None, None, *WORDS], {END}, 260 + len(WORDS), MARKS
)
WHOLE_MARK = 260 + WORDS.index(b"<tool_call>")
TEXTS = {token_id: mark.encode() for mark, token_id in MARKS.items()}

NUMBERS = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"$ref":"#/$defs/n"}},"required":["a","b"],'
NUMBERS += '"additionalProperties":false,"$defs":{"n":{"type":"integer","minimum":0,"maximum":9}}}'
TOOLS = (Tool("add", NUMBERS), Tool("ping", ""))
FORMATS = (NIWAKI, HERMES, MISTRAL, LLAMA3)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY, seconds=10)
    yield made
    made.close()


def text_of(ids: Sequence[int]) -> str:
    pieces = (TEXTS.get(i) or VOCABULARY.bytes_of(i) or b"" for i in ids)
    return b"".join(pieces).decode(errors="replace")


def allowed(matcher: Matcher, remaining: int | None = None) -> list[int]:
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    if remaining is None:
        matcher.fill_mask(row)
    else:
        matcher.fill_mask_within(row, remaining)
    tokens = [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
    return tokens if remaining is None else [token for token in tokens if matcher.admits(token, remaining)]


def walk(matcher: Matcher, rng: random.Random, budget: int, *, forces_end: bool = True) -> list[int]:
    """A random text of at most `budget` tokens; markers are likelier than their share, so that calls happen."""
    ids: list[int] = []
    while len(ids) < budget and not matcher.is_done:
        follow = allowed(matcher, budget - len(ids) if forces_end else None)
        marks = [i for i in follow if i in TEXTS or i in (END, WHOLE_MARK)]
        ids.append(rng.choice(marks if marks and rng.random() < 0.3 else follow))
        matcher.accept(ids[-1])
    return ids


def accepts(matcher: Matcher, ids: Sequence[int]) -> bool:
    try:
        for token_id in ids:
            matcher.accept(token_id)
    except ConstraintError:
        return False
    return matcher.can_end


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    data = text.encode()
    while data:
        mark = next((m for m in MARKS if data.startswith(m.encode())), None)
        ids.append(data[0] if mark is None else MARKS[mark])
        data = data[1 if mark is None else len(mark) :]
    return ids


def written(form: CallFormat, *calls: str) -> str:
    """Calls as the format writes them; each is `name arguments`."""
    objects = [f'{{"name":"{call.split()[0]}","{form.arguments_key}":{call.split()[1]}}}' for call in calls]
    if form.is_list:
        return f"{form.begin}[{','.join(objects)}]{form.end}"
    return form.between.join(f"{form.begin}{one}{form.end}" for one in objects)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("is_required", [False, True])
def test_what_the_masks_let_through_is_calls_of_the_tools(
    compiler: ConstraintCompiler, form: CallFormat, is_required: bool
) -> None:
    compiled = compiler.compile(ToolCalls(TOOLS, form, is_required=is_required))
    rng = random.Random(5)
    num_calls = 0
    for _ in range(8):
        matcher = compiled.matcher()
        ids = walk(matcher, rng, 40, forces_end=False)
        ids += () if matcher.can_end else matcher.shortest_ending(1000) or ()
        assert accepts(compiled.matcher(), ids)
        answer = read_answer(text_of([i for i in ids if i != END]), form)
        assert answer.is_whole
        assert answer.calls or not is_required
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            if call.name == "add":
                assert type(arguments["a"]) is int
                assert arguments.keys() == {"a", "b"}
                assert 0 <= arguments["b"] <= 9
            else:
                assert (call.name, arguments) == ("ping", {})
        num_calls += len(answer.calls)
    assert num_calls >= 3 or form is LLAMA3


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_required_named_and_parallel_say_how_many_calls(compiler: ConstraintCompiler, form: CallFormat) -> None:
    add, ping = 'add {"a":-7,"b":3}', "ping {}"
    one, two = ids_of(written(form, add)), ids_of(written(form, add, ping))
    free = ids_of("It is 4.")

    def takes(constraint: Constraint, ids: Sequence[int]) -> bool:
        return accepts(compiler.compile(constraint).matcher(), ids)

    assert takes(ToolCalls(TOOLS, form), one)
    assert takes(ToolCalls(TOOLS, form), free)
    assert takes(ToolCalls(TOOLS, form), two) == (form is not LLAMA3)  # which writes one call and nothing else
    assert not takes(ToolCalls(TOOLS, form, is_parallel=False), two)
    assert not takes(ToolCalls(TOOLS, form, is_required=True), free)
    assert takes(ToolCalls(TOOLS[:1], form, is_required=True), one)
    assert not takes(ToolCalls(TOOLS[1:], form, is_required=True), one)
    for wrong in ('add {"a":1,"b":10}', 'add {"a":1}', 'ping {"a":1}', "pong {}"):
        assert not takes(ToolCalls(TOOLS, form, is_required=True), ids_of(written(form, wrong)))
    if form.mark:
        assert takes(ToolCalls(TOOLS, form), [*free, *one])


@pytest.mark.parametrize(
    ("answer", "text", "other"),
    [
        (JsonSchema('{"type":"integer","minimum":1,"maximum":99}'), "42", "420"),
        (Regex("[a-c]+!"), "abc!", "abc"),
        (Choices(("yes", "no")), "no", "none"),
        (Grammar('start: "a" start "b" | "a" "b"'), "aabb", "aab"),
    ],
)
def test_tools_and_a_format_of_the_answer_are_one_constraint(
    compiler: ConstraintCompiler, answer: Regex | Choices | JsonSchema | Grammar, text: str, other: str
) -> None:
    compiled = compiler.compile(ToolCalls(TOOLS, NIWAKI, answer=answer))
    assert accepts(compiled.matcher(), ids_of(text))
    assert accepts(compiled.matcher(), ids_of(written(NIWAKI, "ping {}")))
    assert not accepts(compiled.matcher(), ids_of(other))
    assert not accepts(compiled.matcher(), [*ids_of(text), *ids_of(written(NIWAKI, "ping {}"))])


CALLED = '{"type":"object","properties":{"name":{"type":"string"},"parameters":{"type":"object"}}}'


@pytest.mark.parametrize(
    ("form", "answer", "text"),
    [
        (LLAMA3, JsonSchema('{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'), '{"a":1}'),
        (
            LLAMA3,
            JsonSchema('{"type":"object","properties":{"name":{"const":"Add"}}}'),
            '{"name":"Add","parameters":1}',
        ),
        (LLAMA3, Regex(r'\{"name":.*'), '{"name":"else","parameters":{}}'),
        (HERMES, Regex("(?s).*"), "say <tool_call>\n{}"),
        (NIWAKI, JsonSchema('{"type":"string"}'), '"<|call|>"'),
        (MISTRAL, Grammar("start: /\\[TOOL_CALLS\\] .*/"), "[TOOL_CALLS] are made"),
    ],
    ids=["object", "another name", "regex", "hermes", "niwaki", "mistral"],
)
def test_an_answer_that_looks_like_a_call_is_none(
    compiler: ConstraintCompiler, form: CallFormat, answer: Regex | JsonSchema | Grammar, text: str
) -> None:
    """It was read as a call that is written wrongly, and the generation failed."""
    compiled = compiler.compile(ToolCalls(TOOLS, form, answer=answer))
    assert accepts(compiled.matcher(), list(text.encode()))
    names = [tool.name for tool in TOOLS]
    for width in (1, 4, len(text)):
        reader = AnswerReader(form, None, names)
        events = [event for at in range(0, len(text), width) for event in reader.push(text[at : at + width])]
        found = answer_of([*events, *reader.finish()], is_whole=reader.is_whole)
        assert (found.content, found.calls, found.is_whole) == (text, (), True)
    call = written(form, "ping {}")
    assert accepts(compiled.matcher(), ids_of(call))
    assert [one.name for one in read_answer(call, form, names=names).calls] == ["ping"]
    for cut in range(1, len(call) - 1 - len(form.end)):
        assert not read_answer(call[:cut], form, names=names).is_whole


def test_what_would_be_read_as_a_call_is_no_answer(compiler: ConstraintCompiler) -> None:
    call = list(written(NIWAKI, "ping {}").encode())  # in letters, where a call has the special tokens
    compiled = compiler.compile(ToolCalls(TOOLS, NIWAKI, answer=Regex("(?s).*")))
    assert not accepts(compiled.matcher(), call)
    assert accepts(compiled.matcher(), [ord(" "), *call])
    for answer in (JsonSchema(CALLED), Grammar("start: /(.|\n)*/")):
        with pytest.raises(ConstraintError, match="the answer may begin as a call of tool 'add' does"):
            compiler.compile(ToolCalls(TOOLS, LLAMA3, answer=answer))


def test_what_only_python_takes_for_a_blank_stands_before_no_call(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(ToolCalls(TOOLS, LLAMA3))
    for text in ("\u00a0{a}", "\v{a}", "\f"):
        assert accepts(compiled.matcher(), ids_of(text))
        assert read_answer(text, LLAMA3).content == text
    assert read_answer(" \n" + written(LLAMA3, "ping {}"), LLAMA3).calls


def test_reasoning_ends_where_its_marker_is_met_first(compiler: ConstraintCompiler) -> None:
    """A marker may overlap itself: `>>>>` was read as the marker and `>`, which the constraint had not taken it for."""
    for marker, thoughts in ((">>>", "a>"), ("-+-", "-+"), ("ababa", "xab")):
        compiled = compiler.compile(Reasoned("", marker, 6, Choices(("yes",))))
        assert not accepts(compiled.matcher(), ids_of(f"{thoughts}{marker}yes"))
        for text in (f"a?{marker}yes", f"{marker}yes"):
            assert accepts(compiled.matcher(), ids_of(text))
            assert read_answer(text, None, ("", marker)).content == "yes"


def test_thoughts_that_are_shown_hold_no_calls() -> None:
    text = "<think>a <tool_call>\n</think>so " + written(HERMES, "ping {}")
    for width in (1, 5, len(text)):
        reader = AnswerReader(HERMES, ("<think>", "</think>"), shows_thoughts=True)
        events = [event for at in range(0, len(text), width) for event in reader.push(text[at : at + width])]
        found = answer_of([*events, *reader.finish()], is_whole=reader.is_whole)
        assert (found.content, found.reasoning) == ("<think>a <tool_call>\n</think>so ", "")
        assert [call.name for call in found.calls] == ["ping"]


def test_reasoning_is_free_within_its_budget_and_then_the_constraint_holds(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Reasoned("<think>", "</think>", 6, Choices(("yes", "no"))))
    assert accepts(compiled.matcher(), ids_of("<think>hm, </think>yes"))
    assert accepts(compiled.matcher(), ids_of("<think></think>no"))
    assert not accepts(compiled.matcher(), ids_of("<think>hm, hm,</think>yes"))  # seven tokens
    assert not accepts(compiled.matcher(), ids_of("<think>hm</think>perhaps"))
    assert not accepts(compiled.matcher(), ids_of("yes"))
    rng = random.Random(1)
    for budget in (19, 20, 23, 60):
        matcher = compiled.matcher()
        ids = [i for i in walk(matcher, rng, budget) if i != END]
        answer = read_answer(text_of(ids), None, ("<think>", "</think>"))
        assert matcher.can_end
        assert answer.content in ("yes", "no")
        assert len(ids) <= budget


def test_out_of_budget_the_shortest_ending_is_taken(compiler: ConstraintCompiler) -> None:
    for constraint in (
        ToolCalls(TOOLS, NIWAKI, is_required=True),
        ToolCalls(TOOLS, HERMES, is_required=True),
        Reasoned("<think>", "</think>", 50, ToolCalls(TOOLS, MISTRAL, is_required=True)),
    ):
        compiled = compiler.compile(constraint)
        shortest = compiled.matcher().shortest_ending(1000)
        assert shortest is not None
        assert compiled.matcher().distance == len(shortest)
        assert compiled.matcher().shortest_ending(len(shortest) - 1) is None
        assert accepts(compiled.matcher(), shortest)
        for budget in range(len(shortest), len(shortest) + 3):
            matcher = compiled.matcher()
            assert len(walk(matcher, random.Random(budget), budget)) <= budget
            assert matcher.can_end


def test_a_text_taken_back_token_by_token_has_the_masks_it_had(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Reasoned("<think>", "</think>", 9, ToolCalls(TOOLS, HERMES)))
    rng = random.Random(3)
    for _ in range(6):
        matcher = compiled.matcher()
        masks: list[list[int]] = []
        clones: list[Matcher] = []
        while len(masks) < 40 and not matcher.is_done:
            masks.append(allowed(matcher))
            clones.append(matcher.clone())
            matcher.accept(rng.choice(masks[-1]))
        for before, clone in zip(reversed(masks), reversed(clones), strict=True):
            matcher.rollback(1)
            assert allowed(matcher) == before == allowed(clone)
        with pytest.raises(ConstraintError, match="take back"):
            matcher.rollback(1)


def parameters(**words: object) -> dict[str, object]:
    """Of one argument, `x`."""
    return {"type": "object", "required": ["x"], "additionalProperties": False, **words}


@pytest.mark.parametrize(
    "words",
    [
        {"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": "HERE"}},
        {"properties": {"x": {"$ref": "#d"}}, "$defs": {"d": {"$anchor": "d", "allOf": ["HERE"]}}},
        {"properties": {"x": {"$dynamicRef": "#d"}}, "$defs": {"d": {"$dynamicAnchor": "d", "allOf": ["HERE"]}}},
        {"$id": "a", "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": "HERE"}},
        {"$id": "https://example.com/a", "properties": {"x": {"$ref": "a#/$defs/d"}}, "$defs": {"d": "HERE"}},
        {"properties": {"x": {"$ref": "d"}}, "$defs": {"d": {"$id": "d", "allOf": ["HERE"]}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/it",
            "definitions": {"it": parameters(properties={"x": {"$ref": "#d"}}), "d": {"$id": "#d", "allOf": ["HERE"]}},
        },
    ],
    ids=["pointer", "anchor", "dynamic anchor", "$id", "absolute $id", "resource", "draft 7"],
)
def test_names_in_the_schema_of_a_tool_are_its_own(compiler: ConstraintCompiler, words: dict[str, object]) -> None:
    """Those of the last tool, or of the first, were taken for those of all."""

    def tool(name: str, kind: str) -> Tool:
        own = words if "$ref" in words else parameters(**words)
        return Tool(name, json.dumps(own).replace('"HERE"', json.dumps({"type": kind})))

    kinds = {"one": ("integer", "1"), "two": ("boolean", "true"), "three": ("null", "null")}
    tools = tuple(tool(name, kind) for name, (kind, _) in kinds.items())
    compiled = compiler.compile(ToolCalls(tools, HERMES, is_required=True))
    for name in kinds:
        for other, (_, value) in kinds.items():
            call = ids_of(written(HERMES, f'{name} {{"x":{value}}}'))
            assert accepts(compiled.matcher(), call) == (name == other)


def test_a_tool_whose_arguments_hold_such_arguments_holds_no_call(compiler: ConstraintCompiler) -> None:
    for said, word in (("2019-09", "$recursiveRef"), ("2020-12", "$dynamicRef"), ("2020-12", "$ref")):
        own = parameters(
            **{"$schema": f"https://json-schema.org/draft/{said}/schema"},
            properties={"x": {"anyOf": [{"type": "null"}, {word: "#"}]}},
        )
        compiled = compiler.compile(ToolCalls((Tool("a", json.dumps(own)),), HERMES, is_required=True))
        assert accepts(compiled.matcher(), ids_of(written(HERMES, 'a {"x":{"x":null}}')))
        assert not accepts(compiled.matcher(), ids_of(written(HERMES, 'a {"x":{"name":"a","arguments":{"x":null}}}')))


def test_the_schema_of_each_tool_is_of_the_draft_that_it_names(compiler: ConstraintCompiler) -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters()}
    beside = {
        **old,
        "properties": {"x": {"$ref": "#/definitions/d", "maximum": 3}},
        "definitions": {"d": {"type": "integer"}},
    }
    new = parameters(properties={"x": {"prefixItems": [{"const": 1}], "maxItems": 1, "type": "array"}})
    compiled = compiler.compile(
        ToolCalls((Tool("old", json.dumps(beside)), Tool("new", json.dumps(new))), HERMES, is_required=True)
    )
    assert accepts(compiled.matcher(), ids_of(written(HERMES, 'old {"x":12}')))  # beside a $ref it asks for nothing
    assert not accepts(compiled.matcher(), ids_of(written(HERMES, 'new {"x":[2]}')))
    later = json.dumps({**old, "properties": new["properties"]})
    with pytest.raises(ConstraintError, match=r"tool 'late': .*/properties/x/prefixItems: draft-07 does not know it"):
        compiler.compile(ToolCalls((Tool("new", json.dumps(new)), Tool("late", later)), HERMES))


def test_forced_markers_are_told(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(ToolCalls(TOOLS, NIWAKI, is_required=True)).matcher()
    assert matcher.forced()[:1] == (CALL,)
    for token_id in ids_of(written(NIWAKI, "ping {}"))[:-1]:
        matcher.accept(token_id)
    assert matcher.forced() == (CALL_END,)
    with pytest.raises(ConstraintError, match="not allowed"):
        matcher.accept(CALL)


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ((), "1 to 128 tools"),
        ((Tool("two words", ""),), "letters, digits"),
        ((Tool("a", ""), Tool("a", "")), "two tools are named 'a'"),
        ((Tool("a", "{"),), "tool 'a': the JSON schema is not valid JSON"),
        ((Tool("a", "[]"),), "tool 'a': a JSON schema must be an object"),
        ((Tool("a", "true"),), "schema of an object"),
        ((Tool("a", '{"properties":{"x":{},"x":{}}}'),), "tool 'a': .* the key 'x' twice"),
        ((Tool("a", '{"type":"string"}'),), "of type 'object'"),
        ((Tool("b", ""), Tool("a", '{"properties":{"x":{"$ref":"#/nowhere"}}}')), "tool 'a': .*/properties/x"),
        ((Tool("a", '{"properties":{"x":{"type":"nothing"}}}'),), "tool 'a': .*/properties/x"),
    ],
)
def test_bad_tools_are_refused_with_the_tool_and_the_place(
    compiler: ConstraintCompiler, tools: tuple[Tool, ...], reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler.compile(ToolCalls(tools, NIWAKI))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_an_answer_is_read_alike_however_it_is_cut(form: CallFormat) -> None:
    text = ("Let me <see>. " if form.mark else "") + written(form, 'add {"a":{"x":["}\\"",2]},"b":"<|/call|>"}')
    if form.mark:
        text = "<think>Hm<thi</think>" + text
    think = ("<think>", "</think>") if form.mark else None
    whole = read_answer(text, form, think)
    assert whole.is_whole
    assert whole.reasoning == ("Hm<thi" if form.mark else "")
    assert whole.content == ("Let me <see>. " if form.mark else "")
    assert [json.loads(call.arguments)["b"] for call in whole.calls] == ["<|/call|>"]
    for width in (1, 2, 3, 7):
        reader = AnswerReader(form, think)
        events = [event for at in range(0, len(text), width) for event in reader.push(text[at : at + width])]
        assert answer_of([*events, *reader.finish()]) == whole


def test_an_answer_that_breaks_off_is_not_whole() -> None:
    text = written(NIWAKI, 'add {"a":12,"b":3}')
    for cut in range(9, len(text) - 1):
        answer = read_answer(text[:cut], NIWAKI)
        assert not answer.is_whole
        assert answer.content == ""
    assert read_answer("It is <|cal", NIWAKI).content == "It is <|cal"
    assert read_answer("<think>so", None, ("<think>", "</think>")).reasoning == "so"


def test_the_format_is_read_from_the_template() -> None:
    assert format_of('{{ \'<|call|>{"name":...,"arguments":\' }}') is NIWAKI
    assert format_of('<tool_call>\\n{"name": ..., "arguments": ') is HERMES
    assert format_of('[TOOL_CALLS] [{"name":, "arguments":') is MISTRAL
    assert format_of('{{ message.tool_calls }} {"name": "x", "parameters": ') is LLAMA3
    assert format_of("<tool_call>\\n<function=name>\\n arguments") is None
    assert format_of("{{ messages }}") is None
