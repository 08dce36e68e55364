"""By how much each token may move the end of a text away, which every constraint tells for its own commitments."""

from __future__ import annotations

import pytest

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.grammar_endings import KnownEnds
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint
from niwaki.runtime.constraints.grammar_vocabulary import ESCAPE_COST, OPENING, PLAIN_COST
from tests.runtime.test_schema_normal import VOCABULARY


@pytest.fixture(scope="module")
def ends() -> KnownEnds:
    compiler = ConstraintCompiler(VOCABULARY)
    compiled = compiler.compile(JsonSchema('{"type": "object", "required": ["abc"]}'))
    compiler.close()
    assert isinstance(compiled, GrammarConstraint)
    return compiled.ends


def test_a_token_costs_what_it_may_open_and_what_it_may_ask_for_inside(ends: KnownEnds) -> None:
    inside = 7  # bytes of `"abc":`
    for token_id, text in enumerate(VOCABULARY.token_bytes):
        if text is None:
            continue
        plain = ESCAPE_COST if any(byte == ord("\\") or byte >= 0x80 for byte in text) else PLAIN_COST
        assert ends.cost(token_id) == max(plain, inside) + sum(byte in OPENING for byte in text) * ends.value


def test_no_token_costs_more_than_the_highest_cost(ends: KnownEnds) -> None:
    costs = [ends.cost(token_id) for token_id in range(VOCABULARY.size)]
    assert max(costs) + ends.value == ends.highest_cost
