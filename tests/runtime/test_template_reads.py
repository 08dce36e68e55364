"""Of a chat template's names, those are read from outside that it has not certainly set itself."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from niwaki.runtime.checkpoint.bundled import MODEL_DIR
from niwaki.runtime.checkpoint.template_reads import names_read
from niwaki.runtime.checkpoint.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{{ a }}{% set a = 1 %}", "a"),
        ("{% set a = 1 %}{{ a }}", ""),
        ("{% set a = a | default(1) %}{{ a }}", "a"),
        ("{% if not date is defined %}{% set date = 'now' %}{% endif %}{{ date }}", "date"),
        ("{% if m %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", "m"),
        ("{% if m %}{% set a = 1 %}{% elif n %}{% set a = 2 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", "m n"),
        ("{% if m %}{% set a = 1 %}{% elif n %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", "a m n"),
        ("{% if m %}{% set a = 1 %}{{ a }}{% endif %}", "m"),
        ("{% for x, y in m if x and b %}{{ x }}{{ y }}{{ loop.index }}{% set c = 1 %}{% endfor %}{{ c }}", "b c m"),
        ("{% for x in m %}{% else %}{{ x }}{% endfor %}", "m x"),
        ("{% set n = namespace(a=b) %}{% set n.a = n.a + c %}{{ n.a }}", "b c namespace"),
        ("{% set a %}{{ b }}{% endset %}{{ a }}", "b"),
        ("{% macro say(x, y=z) %}{{ x }}{{ y }}{{ w }}{{ caller() }}{% endmacro %}{{ say(v) }}", "v w z"),
        ("{% call(x) say(v) %}{{ x }}{{ w }}{% endcall %}", "say v w"),
        ("{% with a = b %}{{ a }}{% endwith %}{{ a }}", "a b"),
        ("{{ 'x' if a is defined and a is false else b }}{{ c.d[e] | join(f) }}", "a b c e f"),
        ("{% set a, b = c %}{{ a }}{{ b }}", "c"),
    ],
)
def test_a_name_is_read_where_nothing_has_certainly_set_it(template: str, read: str) -> None:
    environment = ImmutableSandboxedEnvironment()
    assert sorted(names_read(environment.parse(template))) == read.split()


def test_the_bundled_models_template_reads_no_variables_of_callers() -> None:
    assert Tokenizer(MODEL_DIR).template_variables == frozenset()
