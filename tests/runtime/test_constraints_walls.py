"""What is refused and how, what hostile patterns cost, what the cache keeps, and what happens when the child dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from niwaki.runtime.api import (
    AllOf,
    Choices,
    ConfigError,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    Regex,
    StopRegex,
)
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary, compile_constraint, sources
from niwaki.runtime.constraints.grammar_source import GrammarSource
from niwaki.runtime.constraints.guidance import OF_PROCESSES
from niwaki.runtime.constraints.pattern import parse
from niwaki.runtime.constraints.process import LOOK_SECONDS, STARTS, CompilePool, CompileProcess, Patience
from niwaki.runtime.constraints.schema import TookTooLong
from niwaki.runtime.constraints.sources import Compilable, answer, quick_source, read_answer, request_for, source_of
from niwaki.runtime.constraints.transitions import Transitions, transitions_of

BYTES = Vocabulary([bytes([b]) for b in range(256)], ())
SECONDS = 1.0


@pytest.fixture
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(BYTES, seconds=SECONDS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a{3", "regex 'a{3' is not valid at 4: missing '}'"),
        ("(ab", "regex '(ab' is not valid at 4: missing ')' for the group opened at 1"),
        ("ab)", "regex 'ab)' is not valid at 3: unmatched ')'"),
        ("[a-", "regex '[a-' is not valid at 4: missing ']' for the set opened at 1"),
        ("x[z-a]", "regex 'x[z-a]' is not valid at 3: the range z-a ends below its start"),
        (r"[\d-z]", r"regex '[\d-z]' is not valid at 2: a range needs a character at both ends"),
        (r"[^\x00-\U0010FFFF]", "no character is in this set"),
        ("*a", "regex '*a' is not valid at 1: nothing to repeat before '*'"),
        ("a**", "regex 'a**' is not valid at 3: a repeat of a repeat needs a group"),
        ("a{2}{3}", "a repeat of a repeat needs a group"),
        ("a++", "regex 'a++' is not valid at 3: possessive repeats are not supported"),
        ("(?#\\\\)a(?#b\\)c", r"is not valid at 13: a comment that ends in a backslash goes on behind it in Python"),
        ("a{5,2}", "regex 'a{5,2}' is not valid at 2: the repeat {5,2} ends below its start"),
        ("a{12345678}", "the count '12345678' is too large"),
        ("^*", "regex '^*' is not valid at 1: an anchor cannot be repeated"),
        ("a^b", "regex 'a^b' matches no text"),
        ("(?=a)b", "regex '(?=a)b' matches no text"),
        ("(?=(?<=a)b)b", "regex '(?=(?<=a)b)b' is not valid at 4: a look-ahead"),
        (r"a(?=b$|\bc).*", "is not valid at 8: a look-ahead"),
        ("(?>a)b", "an atomic group is not supported"),
        ("(a)(?(1)b|c)", "a conditional is not supported"),
        ("(?P<x>a)(?P=x)", "regex '(?P<x>a)(?P=x)' is not valid at 9: a back-reference is not supported"),
        (r"(a)\1", r"regex '(a)\1' is not valid at 4: a back-reference is not supported"),
        ("(?x)a b", "the flag 'x' is not supported: only i, m, s and u are"),
        ("a(?i)", "flags for the whole regex must stand at its start"),
        ("(?&a)", "unknown kind of group"),
        ("(?<1>a)", "'1' is not a group name"),
        ("\\", "a backslash at the end"),
        (r"\q", r"regex '\q' is not valid at 1: unknown escape \q"),
        (r"\x4", r"\x needs 2 hexadecimal digits"),
        (r"\x{110000}", "110000 is not the number of a character"),
        (r"\ud800", "d800 is not the number of a character"),
        (r"\p{a{b}", "is not a Unicode property"),
        (r"\p{Nonsense}", "cannot be compiled"),
        ("[[:alpha:]]", "POSIX classes are not supported"),
        ("a\0b", "regex 'a\0b' is not valid at 2: a NUL character is not allowed"),
        ("a\ud800", r"regex 'a\ud800' is not valid at 2: a lone surrogate is not text"),
        ("\U0010ffff", "a noncharacter is not text"),
        ("a" * 70_000, "a regex of 70000 bytes is too long: at most 65536"),
        ("(" * 65 + ")" * 65, "groups are nested deeper than 64"),
        ("(a{1,1000}){1,1000}", "is too large: about 1000000 states written out"),
        (".{0,10000}x", "is too large: about 70002 states written out"),
        ("[^x]{3000,20000}", "is too large: about 140000 states written out"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    pattern: str, message: str, compiler: ConstraintCompiler
) -> None:
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(Regex(pattern))
    assert message in str(caught.value)
    str(caught.value).encode()  # can be written to a log


def test_a_refusal_of_a_long_pattern_is_short(compiler: ConstraintCompiler) -> None:
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(Regex("a" * 5000 + "("))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Choices(()), "choices must hold at least one text"),
        (Choices(("a", 3)), "choices must be strings, got 3"),  # type: ignore[arg-type]
        (Choices(("\udc00",)), "lone surrogate"),
        (Choices(("x",) * 100_001), "at most 100000 choices, got 100001"),
        (Choices(("x" * 5_000_000,)), "the choices hold 5000000 bytes together"),
    ],
)
def test_choices_that_are_no_texts_are_refused(
    constraint: Constraint, message: str, compiler: ConstraintCompiler
) -> None:
    with pytest.raises(ConstraintError, match=message):
        compiler.compile(constraint)


HOSTILE = [
    "(a|b)*a(a|b){20}",
    "(a|b)*a(a|b){300}",
    "((a{0,30}){0,30}){0,10}",
    "(a?){50}a{50}",
    "(.*a){12}.{12}",
    r"(\w{1,30}|\d{1,30}|[^x]{1,30}){1,5}",
    "|".join(f"{i:05d}.*" for i in range(1500)),
    "(x+x+)+y",
    "(" * 64 + "a" + ")*" * 64,
]


@pytest.mark.parametrize("pattern", HOSTILE, ids=[p[:24] for p in HOSTILE])
def test_hostile_patterns_are_compiled_or_refused_in_about_a_second(pattern: str, compiler: ConstraintCompiler) -> None:
    compiler.compile(Regex("(a|b)*a"))  # the process runs
    began = time.process_time()  # of this process; the other one's is limited, and told in the refusal
    try:
        compiled = compiler.compile(Regex(pattern))
    except ConstraintError as error:
        refusal = str(error)
    else:
        refusal = ""
        row = np.zeros(BYTES.num_words, np.uint32)
        compiled.matcher().fill_mask(row)
        assert row.any()
    assert not refusal or "is too complex to compile within 1 s" in refusal or "is too large" in refusal
    assert time.process_time() - began < SECONDS + 2
    assert compiler.compile(Regex("(a|b)*b")).num_states > 0  # and the next one finds a process


# Simple for a matcher that starts at the start, exponential for a search that may start anywhere.
@pytest.mark.parametrize(
    "pattern", ["[a-z][a-z0-9_]{0,60}", "4[0-9]{30}", "[ab]a[ab]{40}", "(ab|a)[ab]{0,40}", "[^a]b.{50}"]
)
def test_long_counted_repeats_of_overlapping_sets_stay_small(pattern: str, compiler: ConstraintCompiler) -> None:
    assert compiler.compile(Regex(pattern)).num_states < 1000


@pytest.mark.parametrize(
    ("pattern", "is_harmless"),
    [
        (r"\d{4}-\d\d-\d\d", True),
        (r"[a-z][a-z0-9_]{0,60}", True),
        (r"(a|b)*c", True),
        (r"(a|b)*a", False),
        (r"(ab|ac)", False),
        (r"a?a", False),
        (r"(?i:a)(b|c)", True),
        (r"(?i:a)|b", False),  # what else (?i:...) matches is not worked out
        (r"\w+é", True),
        (r"\D+é", False),
        (r"\w+-\W", True),
        (r"[^\W\d]1|2", True),
        (r"[^\W\d]1|a2", False),
        (r"\p{L}|1", False),
        (r"[^\w]{1,30}", False),  # one-unambiguous, but large
    ],
)
def test_only_patterns_that_provably_stay_small_are_compiled_in_this_process(pattern: str, is_harmless: bool) -> None:
    assert parse(pattern).is_harmless == is_harmless


def test_harmless_patterns_start_no_process(compiler: ConstraintCompiler) -> None:
    compiler.compile(Regex(r'\{"a": "[a-z ]{0,40}", "b": -?[0-9]{1,9}\}'))
    assert not compiler._pool.pids
    compiler.compile(Regex("(a|b)*a"))
    assert compiler._pool.pids


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("(a|b)*é"),
        StopRegex(r"\d\."),
        AllOf((Regex("a*"), Choices(("a", "é")), StopRegex("a"))),
        JsonSchema('{"type": "object", "properties": {"é": {"type": "string", "minLength": 3}}}', "free"),
        Grammar('root ::= "a" | "é"', "ebnf"),
        Regex("(a"),
        JsonSchema('{"type": "\\ud800"}'),
        Grammar(3),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_the_process_finds_what_this_one_would(constraint: Compilable) -> None:
    def found(there: bool) -> object:
        try:
            if there:
                return read_answer(answer(request_for(constraint, b"ab"), SECONDS))
            return source_of(constraint, SECONDS, b"ab")
        except ConstraintError as error:
            return str(error)

    assert found(there=True) == found(there=False)


def test_most_schemas_are_plain_enough_for_this_process() -> None:
    """Those with words that ask for rewriting are not, nor what would be tried first."""
    bounds = '{"minimum": 1, "maximum": 500, "maxLength": 32767, "maxItems": 1000, "$schema": "x"}'
    for quick in ('{"properties": {"knot": {"type": "null"}}}', bounds):
        assert quick_source(JsonSchema(quick), SECONDS, b"a") is not None
    least = ('{"minLength": 700}', '{"minItems": 700}')
    for slow in (*least, '{"uniqueItems": true}', '{"anyOf":[{"minProperties":1}]}', 5000 * " "):
        assert quick_source(JsonSchema(slow), SECONDS, b"a") is None


def test_schemas_that_take_long_to_rewrite_are_left_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = JsonSchema('{"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"not": {"const": 1}}}}')
    monkeypatch.setattr(sources, "QUICK_SECONDS", 60.0)
    assert quick_source(schema, 60.0, b"a") is not None
    monkeypatch.setattr(sources, "QUICK_SECONDS", 0.0)
    assert quick_source(schema, 60.0, b"a") is None
    assert source_of(schema, 60.0, b"a") is not None


def _twice(depth: int) -> str:
    """Lists of two lists, so deep: a short schema of a text of 2**depth numbers."""
    lists = "".join(
        f'"d{i}": {{"type": "array", "minItems": 2, "items": {{"$ref": "#/$defs/d{i + 1}"}}}}, ' for i in range(depth)
    )
    return f'{{"$ref": "#/$defs/d0", "$defs": {{{lists}"d{depth}": {{"type": "integer"}}}}}}'


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "array", "minItems": 400, "items": {"type": "array", "minItems": 400}}',
        _twice(14),
        '{"type": "string", "format": "date-time", "minLength": 300, "maxLength": 301}',
        '{"type": "string", "format": "date-time", "not": {"format": "idn-email"}}',
        '{"type": "string", "p\\u0061ttern": "^a*$"}',
        f'{{"type": "string", "not": {{"const": "{2000 * "b"}"}}}}',
    ],
)
def test_a_short_schema_that_asks_for_much_is_left_to_another_process(schema: str) -> None:
    """What takes 100 ms without a look at the watch, or for ever: long texts are written out, languages searched."""
    assert quick_source(JsonSchema(schema), SECONDS, b"a") is None


def test_harmless_patterns_really_stay_small() -> None:
    rng = random.Random(0)
    leaves = ["a", "b", "c", "[ab]", "[^a]", r"\d", "é", "[a-zà-ÿ]", "."]
    found = 0
    for _ in range(1000):
        parts = [
            "".join(rng.choices(leaves, k=rng.randint(1, 3))) + rng.choice(["", "*", "{0,9}", "{3}"]) for _ in range(3)
        ]
        pattern = parse(f"(?:{parts[0]}|{parts[1]}){rng.choice(['', '*', '{1,7}'])}{parts[2]}")
        if pattern.is_harmless:
            found += 1
            assert isinstance(pattern.expression, str)
            assert len(transitions_of(pattern.expression).accepting) <= 1500 + 20, pattern
    assert found > 40


def test_time_outs_are_forgotten_and_refusals_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(BYTES, seconds=0.05)
    slow = Regex("(a|b)*a(a|b){22}")
    with pytest.raises(ConstraintError, match="too complex"):
        compiler.compile(slow)
    assert not compiler.is_known(slow)
    with pytest.raises(ConstraintError, match="back-reference"):
        compiler.compile(Regex(r"(a)\1"))
    assert compiler.is_known(Regex(r"(a)\1"))
    monkeypatch.setattr("niwaki.runtime.constraints.sources.parse", None)  # nothing is read again
    with pytest.raises(ConstraintError, match="back-reference"):
        compiler.compile(Regex(r"(a)\1"))
    compiler.close()


def test_the_cache_gives_the_same_object_and_keeps_within_its_bytes() -> None:
    compiler = ConstraintCompiler(BYTES, max_bytes=300_000)
    first = compiler.compile(Regex("a[0-9]*"))
    assert compiler.compile(Regex("a[0-9]*")) is first
    for number in range(150):
        compiler.compile(Regex(f"{number}[a-z]{{1,9}}"))
        compiler.compile(Regex("a[0-9]*"))  # used again and again: the last to go
        assert compiler.num_bytes <= 300_000
    assert 2 <= len(compiler) < 120
    assert compiler.compile(Regex("a[0-9]*")) is first
    compiler.close()


def test_the_cache_weighs_a_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[Constraint] = []

    def weigh(constraint: Constraint) -> int:
        weighed.append(constraint)
        return 100

    monkeypatch.setattr("niwaki.runtime.constraints.compiler._source_bytes", weigh)
    compiler = ConstraintCompiler(BYTES)
    asked = [Choices((f"text {number}", "another")) for number in range(4)]
    for constraint in asked:
        compiler.compile(constraint)
        assert compiler.num_bytes > 0
    assert weighed == asked
    compiler.close()


def ends(pid: int) -> bool:
    """Whether a child of ours ends, which nobody has waited for yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None


def test_a_killed_process_is_replaced(compiler: ConstraintCompiler) -> None:
    for number in range(3):
        compiler.compile(Regex(f"(a|b)*a{number}"))
        (pid,) = compiler._pool.pids
        os.kill(pid, signal.SIGKILL)
        assert ends(pid)
    assert compiler.compile(Regex("(a|b)*ab")).num_states > 0


def asked(process: CompileProcess, regex: str) -> Transitions:
    found = read_answer(process.ask(request_for(Regex(regex), b"")))
    assert isinstance(found, Transitions)
    return found


def test_closing_leaves_no_child_and_allows_to_go_on() -> None:
    process = CompileProcess(seconds=20)
    assert asked(process, "a|ab").accepting
    pid = process.pid
    assert pid is not None
    process.close()
    assert process.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert asked(process, "a|ab").accepting
    process.close()


@pytest.mark.skipif(sys.platform != "linux", reason="sessions and niceness as Linux has them")
def test_a_child_gives_way_to_the_steps_of_an_engine() -> None:
    """Niceness counts within a session alone where Linux shares processors among sessions (autogroup)."""
    process = CompileProcess(seconds=20)
    asked(process, "a|ab")
    assert process.pid is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, own + OF_PROCESSES)
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C is not for it"
    process.close()


def test_a_child_that_runs_out_of_time_is_gone_and_the_next_one_starts_at_once() -> None:
    process = CompileProcess(seconds=1)
    asked(process, "ab")
    pid = process.pid
    assert pid is not None
    with pytest.raises(TookTooLong):
        asked(process, "(?:a|b)*a(?:a|b){25}")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.pid is not None
    process.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a child that stands still is waited for")
def test_a_child_that_its_clock_ends_when_a_container_goes_on_is_asked_once_more() -> None:
    process = CompileProcess(seconds=20)
    asked(process, "ab")
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None
    os.kill(pid, signal.SIGALRM)  # by the clock it is late; it ends once it goes on
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(asked, process, "a|ab")
        while not process._lock.locked():
            pass
        os.kill(pid, signal.SIGCONT)
        assert answered.result().accepting
    assert process.pid not in (None, pid)
    process.close()


def test_time_in_which_nobody_looks_at_the_clock_is_no_time_of_the_childs() -> None:
    now = 0.0
    patience = Patience(10.0, lambda: now)
    for seconds in (0.5, LOOK_SECONDS, 3600.0, 0.0):  # paused for an hour
        now += seconds
        left = patience.left()
    assert left == 10.0 - 0.5 - 2 * LOOK_SECONDS
    for _ in range(20):
        now += LOOK_SECONDS
        left = patience.left()
    assert left == 0.0


@pytest.mark.parametrize("num_killed", [1, STARTS - 1, STARTS])
def test_a_child_that_is_killed_while_it_starts_is_replaced(num_killed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompileProcess(seconds=20)
    start = process._started
    killed: list[int] = []

    def started() -> subprocess.Popen[bytes]:
        child = start()
        if len(killed) < num_killed:
            child.kill()
            killed.append(child.pid)
        return child

    monkeypatch.setattr(process, "_started", started)
    if num_killed < STARTS:
        assert asked(process, "a|ab").accepting
    else:
        with pytest.raises(OSError, match="did not start"):
            asked(process, "a|ab")
    assert len(killed) == num_killed
    assert asked(process, "a|ab").accepting, "the next one finds a child that runs"
    process.close()


def test_who_asks_for_too_much_holds_up_nobody_else() -> None:
    pool = CompilePool(seconds=20)
    request = request_for(Regex("ab"), b"")
    pool.ask(request)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)  # as one that computes for long
    with ThreadPoolExecutor(1) as threads:
        held_up = threads.submit(pool.ask, request)
        while not pool._processes[-1]._lock.locked():
            pass
        assert read_answer(pool.ask(request)) == transitions_of("ab")
        os.kill(pid, signal.SIGCONT)
        assert read_answer(held_up.result()) == transitions_of("ab")
    pool.close()


def test_what_the_child_answers_is_read_back_the_same_and_a_torn_answer_is_an_error() -> None:
    found = transitions_of("[ab]c*")
    assert Transitions.from_bytes(found.to_bytes()) == found
    grammar = source_of(JsonSchema('{"enum": ["\\ud83d\\ude00", 1]}'), 1, b"a")
    assert isinstance(grammar, GrammarSource)
    assert GrammarSource.from_bytes(grammar.to_bytes()) == grammar
    with pytest.raises(ValueError, match="cannot hold"):
        Transitions.from_bytes(found.to_bytes()[:-1])


def test_a_constraint_that_no_tokens_can_spell_is_refused() -> None:
    vocabulary = Vocabulary([b"ab", b"c"], ())
    assert compile_constraint(Regex("(ab)+c|b"), vocabulary).matcher().distance == 2
    with pytest.raises(ConstraintError, match="no sequence of tokens"):
        compile_constraint(Regex("a+c"), vocabulary)
    with pytest.raises(ConstraintError, match="set of 2 choices cannot be used"):
        compile_constraint(Choices(("b", "a")), vocabulary)


def test_a_vocabulary_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="size 1 is below its 2 tokens"):
        Vocabulary([b"a", b"b"], (), 1)
    with pytest.raises(ConfigError, match="end token 7 is outside the vocabulary of 2"):
        Vocabulary([b"a", b"b"], (7,))


AS_A_NICE_USER = """
import os
from niwaki.runtime.constraints.guidance import NICENESS, build, byte_tokenizer
os.nice(NICENESS + 5)
if os.getuid() == 0:
    os.setuid(65534)  # who may not be less nice again
build("start: /a/", byte_tokenizer())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no niceness there")
def test_who_was_started_as_nicer_than_what_compiles_compiles_too() -> None:
    done = subprocess.run([sys.executable, "-c", AS_A_NICE_USER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
