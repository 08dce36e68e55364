"""What is compiled in the process of an engine that steps meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, grammar_source
from niwaki.runtime.constraints.guidance import NICENESS, build
from tests.runtime.test_schema_normal import VOCABULARY, admits

SMALL = JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
OTHER = JsonSchema('{"type": "array", "items": {"type": "boolean"}}')


@pytest.fixture
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY)
    yield compiler
    compiler.close()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name and the niceness of the threads that matchers are built on."""
    found: list[tuple[str, int]] = []

    def noted(grammar: str, tokenizer: LLTokenizer, *, is_shallow: bool, max_items: int) -> LLMatcher:
        found.append((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, 0)))
        return build(grammar, tokenizer, is_shallow=is_shallow, max_items=max_items)

    monkeypatch.setattr(grammar_source, "build", noted)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_small_grammars_give_way_to_the_steps_of_an_engine(
    compiler: ConstraintCompiler, places: list[tuple[str, int]]
) -> None:
    pauses: list[None] = []
    own = os.getpriority(os.PRIO_PROCESS, 0)
    compiler.steps_beside(lambda: pauses.append(None))
    matcher = compiler.compile(SMALL).matcher()
    compiler.compile(OTHER)
    assert admits(matcher, {"a": 1})
    assert not admits(matcher, {"a": "x"})
    assert {name.partition("_")[0] for name, _ in places} == {"niwaki-grammar"}
    assert {niceness for _, niceness in places} == {own + NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert pauses


def test_each_part_of_a_schema_gives_way_to_the_steps_of_an_engine(compiler: ConstraintCompiler) -> None:
    pauses: list[None] = []
    compiler.steps_beside(lambda: pauses.append(None))
    parts = ", ".join(f'"{letter}": {{"maxLength": {length}}}' for length, letter in enumerate("abcdefghijkl"))
    compiler.compile(JsonSchema(f'{{"type": "object", "properties": {{{parts}}}, "additionalProperties": false}}'))
    assert len(pauses) > 12


def test_the_thread_ends_with_the_compiler_and_comes_again_when_it_is_needed(compiler: ConstraintCompiler) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("niwaki-grammar")]

    before = len(names())
    compiler.steps_beside(lambda: None)
    compiler.compile(SMALL)
    assert len(names()) == before + 1
    compiler.close()
    assert len(names()) == before
    compiler.compile(OTHER)
    assert len(names()) == before + 1


def test_without_an_engine_they_are_built_where_they_are_asked_for(
    compiler: ConstraintCompiler, places: list[tuple[str, int]]
) -> None:
    compiler.compile(SMALL)
    assert [name for name, _ in places] == [threading.current_thread().name]
