"""Programs on our own server through OpenAI's API: what its client library makes of answers comes back as values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.engine import Engine

pytest.importorskip("openai")


@pytest.fixture(scope="module")
def chat(url: str) -> Iterator[nw.OpenAI]:
    backend = nw.OpenAI("toy", base_url=url + "/v1", api_key="-", extensions=True)
    yield backend
    backend.shutdown()


@pytest.fixture(scope="module")
def completions(url: str) -> Iterator[nw.OpenAI]:
    backend = nw.OpenAI("toy", base_url=url + "/v1", api_key="-", api="completions", extensions=True)
    yield backend
    backend.shutdown()


@nw.function
def talk(s: State) -> None:
    s += nw.user("the cat sat")
    s += nw.assistant(nw.gen("said", max_new_tokens=6, temperature=0, return_logprob=True, top_logprobs_num=2))
    s += nw.user("on the mat?") + nw.assistant(nw.gen("sure", dtype=Literal["yes", "no"], temperature=0))
    s += nw.user("how many?") + nw.assistant(nw.gen("count", dtype=int, temperature=0, max_new_tokens=8))


def test_a_conversation_has_typed_values_and_usage(engine: Engine, chat: nw.OpenAI) -> None:
    state = talk.run(backend=chat)
    here = talk.run(backend=engine)
    assert state["said"] == here["said"]
    assert state["sure"] in ("yes", "no")
    assert isinstance(state["count"], int)
    meta, own = state.get_meta_info("said"), here.get_meta_info("said")
    assert meta["completion_tokens"] == own["completion_tokens"]
    assert meta["finish_reason"] in (own["finish_reason"], {"type": "stop"})
    assert isinstance(meta["output_token_logprobs"], list)
    assert state.usage.prompt_tokens > 0
    written = state.get_meta_info("sure")["completion_tokens"]  # a service generates what an engine scores
    assert state.usage.generated_tokens == here.usage.generated_tokens + written


def test_plain_text_generates_and_selects(engine: Engine, completions: nw.OpenAI) -> None:
    @nw.function
    def choose(s: State) -> None:
        s += "the cat sat on the"
        s += nw.gen("code", regex=" [ab]{3}", temperature=0)
        s += nw.select("where", choices=[" mat", " log"])

    state, here = choose.run(backend=completions), choose.run(backend=engine)
    assert state["code"] == here["code"]
    assert state["where"] in (" mat", " log")
    assert len(state.get_meta_info("where")["choices"]) == 2
