"""The same program file on every backend: the same values, or the refusal of what that one cannot do, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest

import niwaki as nw
from niwaki.lang.backends import Host
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving
from tests.test_examples import load

pytest.importorskip("openai")

Script: TypeAlias = dict[str | re.Pattern[str], str]

# A file of examples/, its program and arguments, the variable that is looked at, and how a prompt ends -> the answer.
RUNS: dict[str, tuple[str, dict[str, object], str, Script]] = {
    "extract": (
        "extract",
        {"text": "Hi, I'm Lena Fischer, a nurse from Dresden."},
        "contact",
        {"": '{"name":"Lena Fischer","email":null,"phone":null,"company":null,"role":"nurse","city":"Dresden"}'},
    ),
    "stages": (
        "profile",
        {},
        "facts",
        {
            f"{question.format(person)}\nAnswer:": f" {fact}"
            for person, *facts in (
                ("Mira", "Porto", "Lantern Labs"),
                ("Jonas", "Bergen", "Quarry Foods"),
                ("Edda", "Leeds", "Harbor Media"),
                ("Tom", "Graz", "Pebble Systems"),
            )
            for question, fact in zip(("Where does {} live?", "Who does {} work for?"), facts, strict=True)
        },
    ),
    "choices": (
        "classify",
        {"review": "The staff was wonderful.", "method": "token_length_normalized"},
        "label",
        {"": " positive"},
    ),
}
# What a service that takes turns, or text, cannot do.
REFUSED = {
    ("extract", "completions"): "chat turns need OpenAI's chat API",
    ("stages", "chat"): "text outside of chat turns",
    ("choices", "chat"): "chat API does not give",
}


@pytest.fixture(scope="module")
def backends(bundled_engine: Engine) -> Iterator[dict[str, Host]]:
    with serving(bundled_engine) as url, nw.RuntimeEndpoint(url) as endpoint, ExitStack() as stack:
        made: dict[str, Host] = {"engine": bundled_engine, "endpoint": endpoint}
        for api in ("chat", "completions"):
            service = nw.OpenAI("niwaki-tiny", base_url=f"{url}/v1", api_key="-", api=api, extensions=True)
            stack.callback(service.shutdown)
            made[api] = service
        yield made


@pytest.mark.parametrize("name", ["engine", "endpoint", "chat", "completions", "scripted"])
@pytest.mark.parametrize("file", RUNS)
def test_a_program_file_gives_the_same_on_every_backend_or_is_refused(
    file: str, name: str, backends: dict[str, Host]
) -> None:
    program, arguments, variable, script = RUNS[file]
    example = load(file)

    def value(backend: Host) -> object:
        state = getattr(example, program).run(**arguments, options={"backend": backend, "temperature": 0})
        return state[variable]

    backend = nw.ScriptedBackend(script) if name == "scripted" else backends[name]
    refusal = REFUSED.get((file, name))
    if refusal is not None:
        with pytest.raises(nw.UnsupportedByBackend, match=refusal):
            value(backend)
        return
    assert value(backend) == value(nw.ScriptedBackend(script))
