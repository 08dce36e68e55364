"""The text programs that SGLang publishes in its own test file run on niwaki, unchanged but for what `sglang` is.

The file comes out of SGLang's wheel (tests/sglang_wheel.py). Each program runs twice: on the bundled model, without
the assertions that ask for knowledge of the world, and with all its assertions on a backend that knows the answers.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import ModuleType

import pytest

import niwaki as nw
from niwaki.lang.patterns import REGEX_FLOAT, REGEX_INT, REGEX_STR
from niwaki.lang.program import Program
from niwaki.lang.state import State
from niwaki.runtime.engine import Engine
from tests.sglang_shim import installed
from tests.sglang_wheel import sglang_wheel

MEMBER = "sglang/test/test_programs.py"
PAGE = Path(__file__).parent.parent.parent / "docs" / "migration.md"

# The assertions that a model without knowledge of the world cannot meet, as they stand in the file.
KNOWLEDGE = {
    "'washington' in ret['answer'].strip().lower()",
    "answers == ['tokyo', 'london', 'beijing']",
    "int(ret['hours']) == 24",
    "int(ret['days']) == 365",
    "int(ret['answer']) == lhs * rhs",
    "'finland' in answer or 'states' in answer",
}


@pytest.fixture(scope="module")
def source() -> str:
    """The text of SGLang's test file."""
    with zipfile.ZipFile(sglang_wheel()) as archive:
        return archive.read(MEMBER).decode("utf-8")


def test_what_has_no_name_here_stands_on_the_page_of_what_differs() -> None:
    with zipfile.ZipFile(sglang_wheel()) as archive:
        tree = ast.parse(archive.read("sglang/__init__.py"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert "gen" in names
    page = PAGE.read_text("utf-8")
    missing = [name for name in names if name not in nw.__all__]
    assert [name for name in missing if not re.search(rf"`(sgl\.)?{name}`", page)] == []


class _WithoutKnowledge(ast.NodeTransformer):
    """Takes the assertions about the world out, and notes which."""

    def __init__(self) -> None:
        self.removed: set[str] = set()

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:  # the name that ast calls
        text = ast.unparse(node.test)
        if text not in KNOWLEDGE:
            return node
        self.removed.add(text)
        return ast.copy_location(ast.Pass(), node)


class Recorder:
    """Every state that the file's programs give, to look at after the test function has read what it wants."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def function(self, func: Callable[..., object]) -> Program:
        @wraps(func)
        def body(s: State, *args: object, **kwargs: object) -> object:
            self.states.append(s)
            return func(s, *args, **kwargs)

        return nw.function(body)


def load(source: str, recorder: Recorder, *, with_knowledge: bool) -> ModuleType:
    """The file as a module, under the installed shim."""
    tree = ast.parse(source)
    if not with_knowledge:
        transformer = _WithoutKnowledge()
        tree = ast.fix_missing_locations(transformer.visit(tree))
        assert transformer.removed == KNOWLEDGE, "the file is not the one that these tests were written for"
    module = ModuleType("test_programs_of_sglang")
    sys.modules["sglang"].function = recorder.function  # type: ignore[attr-defined]  # the shim's, for this run
    exec(compile(tree, MEMBER, "exec"), vars(module))
    vars(module)["eval"] = arithmetic  # one program evaluates what the model wrote
    return module


def arithmetic(expression: str) -> int:
    """The value of products and sums of whole numbers. Raises SyntaxError for everything else that a model writes."""
    operators: dict[type, Callable[[int, int], int]] = {ast.Mult: operator.mul, ast.Add: operator.add}

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
            case _:
                raise SyntaxError(f"no arithmetic: {expression!r}")

    return value(ast.parse(expression.strip(), mode="eval").body)


# ---------------------------------------------------------------------------------------------------------------
# On the bundled model
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(seed=7) as engine:
        yield engine


class Tokens:
    """What the file wants of a tokenizer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode([nw.runtime.api.Segment(text)])


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def programs(source: str, engine: Engine, recorder: Recorder) -> Iterator[ModuleType]:
    with installed(engine, "niwaki-tiny", lambda name: Tokens(engine)):
        yield load(source, recorder, with_knowledge=False)


def all_ended_well(recorder: Recorder, count: int) -> list[State]:
    assert len(recorder.states) == count
    for state in recorder.states:
        assert state.error() is None
    return recorder.states


def test_few_shot_qa(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_few_shot_qa()
    for state in all_ended_well(recorder, 4):
        assert isinstance(state["answer"], str)
        assert "\n" not in state["answer"]


def test_mt_bench(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_mt_bench()
    [state] = all_ended_well(recorder, 1)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_select(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_select(check_answer=False)
    all_ended_well(recorder, 3)


def test_decode_int(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_decode_int()
    [state] = all_ended_well(recorder, 1)
    assert type(state["hours"]) is type(state["days"]) is int


def test_decode_json_regex(programs: ModuleType, recorder: Recorder) -> None:
    with suppress(json.JSONDecodeError):  # its own regexes admit +5, 007 and line ends inside quotes: no JSON
        programs.test_decode_json_regex()
    [state] = all_ended_well(recorder, 1)
    shape = rf'{{\n  "name": {REGEX_STR},\n  "population": {REGEX_INT},\n  "area": {REGEX_INT},\n'
    shape += rf'  "latitude": {REGEX_FLOAT}\n}}'
    assert re.fullmatch(shape, str(state["json_output"]))


def test_decode_json(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_decode_json()
    [state] = all_ended_well(recorder, 1)
    found = json.loads(str(state["json_output"]))
    assert [type(value) for value in found.values()] == [str, int, int, str, str]


def test_expert_answer(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_expert_answer(check_answer=False)
    [state] = all_ended_well(recorder, 1)
    assert isinstance(state["answer"], str)


def test_tool_use(programs: ModuleType, recorder: Recorder) -> None:
    try:
        programs.test_tool_use()
    except SyntaxError as raised:  # out of the program's body, as it was raised: the model wrote no arithmetic
        assert recorder.states[0].error() is raised  # noqa: PT017  # it is allowed, not asked for
    else:
        [state] = all_ended_well(recorder, 1)
        assert int(str(state["answer"])) >= 0


def test_react(programs: ModuleType, recorder: Recorder) -> None:
    try:
        programs.test_react()
    except KeyError:  # four steps without "Finish": the program never set the answer
        assert "Finish" not in [recorder.states[0][f"action_{i}"] for i in range(1, 5)]
    [state] = all_ended_well(recorder, 1)
    assert state["action_1"] in ("Search", "Finish")


def test_parallel_decoding(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_parallel_decoding()
    [state] = all_ended_well(recorder, 1)
    tips = state["detailed_tip"]
    assert isinstance(tips, list)
    assert [type(tip) for tip in tips] == [str] * 5


def test_parallel_encoding(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_parallel_encoding(check_answer=False)
    [state] = all_ended_well(recorder, 1)
    assert "Statement 0: Ethan is the father of Liam.\nStatement 1: Noah" in state.text()


def test_stream(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_stream()
    all_ended_well(recorder, 2)


def test_stream_logprobs(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_stream_logprobs()
    all_ended_well(recorder, 1)


def test_regex(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_regex()
    all_ended_well(recorder, 1)


def test_dtype_gen(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_dtype_gen()
    [state] = all_ended_well(recorder, 1)
    values = [state[name] for name in ("str_res", "int_res", "float_res", "bool_res")]
    assert [type(value) for value in values] == [str, int, float, bool]


def test_gen_min_new_tokens(programs: ModuleType, recorder: Recorder) -> None:
    programs.test_gen_min_new_tokens()
    [state] = all_ended_well(recorder, 1)
    assert isinstance(count := state.get_meta_info("answer")["completion_tokens"], int)
    assert 64 <= count <= 128


# ---------------------------------------------------------------------------------------------------------------
# On a backend that knows the answers, with every assertion of the file
# ---------------------------------------------------------------------------------------------------------------

# How a prompt ends -> the answer.
ANSWERS: dict[str | re.Pattern[str], str | list[str]] = {
    "United States?\nA:": " Washington, D.C.",
    "Japan?\nA:": " Tokyo",
    "United Kingdom?\nA:": " London",
    "city of China?\nA:": " Beijing",
    "Berlin.\nAnswer:": "True",
    "Tokyo.\nAnswer:": "False",
    "green.\nAnswer:": "Unknown",
    "in a day is ": "24",
    "in a year is ": "365",
    '"name": ': '"Paris"',
    '"population": ': "2103778",
    '"area": ': "105",
    '"latitude": ': "48.85",
    '"country": ': '"France"',
    '"timezone": ': '"CET"',
    "this question is": " a geographer",
    "would answer that ": "the capital of France is Paris",
    "calculate(": "257 * 983",
    "Thought 1:": " I need to search for the creator of Linux",
    "Action 1: ": "Search",
    "Action 1: Search [": "Creator of Linux",
    "Observation 1:": " It is Linus Torvalds, who lives in the United States",
    "Thought 2:": " The answer is the United States",
    "Action 2: ": "Finish",
    "Action 2: Finish [": "United States",
    "A: The full names is ": '"Domain Name System"',
    "was DNS invented?\nA: ": "1983",
    "value of pi?\nA: ": "3.14159",
    "sky blue?\nA: ": "true",
    "DNS servers?\nA: ": "8.8.8.8",
    re.compile(r"Julian\?\nASSISTANT:$"): " Noah.",
    re.compile("tip|Hawaii|letter A|summary"): "Write.",
}
PROGRAMS = (
    "few_shot_qa mt_bench select decode_int decode_json_regex decode_json expert_answer tool_use react "
    "parallel_decoding parallel_encoding stream regex dtype_gen".split()
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_the_right_answers_every_assertion_of_the_file_holds(name: str, source: str, recorder: Recorder) -> None:
    with installed(nw.ScriptedBackend(ANSWERS), "scripted", lambda name: None):
        module = load(source, recorder, with_knowledge=True)
        test = getattr(module, f"test_{name}")
        if name == "select":
            test(check_answer=True)
        else:
            test()
        all_ended_well(recorder, {"few_shot_qa": 4, "select": 3, "stream": 2}.get(name, 1))


# ---------------------------------------------------------------------------------------------------------------
# Options that only programs written for SGLang give
# ---------------------------------------------------------------------------------------------------------------


def test_an_option_that_changes_nothing_here_is_taken() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "? " + nw.gen("x", return_logprob=True, return_text_in_logprobs=True)

    state = f.run(backend=nw.ScriptedBackend(["yes"]), return_text_in_logprobs=True)
    tokens = state.get_meta_info("x")["output_token_logprobs"]
    assert isinstance(tokens, list)
    assert [text for _, _, text in tokens] == ["yes"]
