"""`reasoning_effort`, verbosity, refusals in a history, and the older functions: what each means to which model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from niwaki.runtime.api import Generation, Reasoned, Regex, SamplingParams
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.effort import TOKENS, Effort, Reasons, reasons_of
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.openai_models import ChatMessage
from niwaki.runtime.server.serve import serving
from tests.toy import make_model, make_tokenizer

TURNS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ALWAYS = f"{TURNS}{OPEN}{{# <think> and </think> are left out of what was said #}}"  # in the manner of DeepSeek R1
SWITCHED = (  # of Qwen 3
    TURNS + "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
LEVELS = f"Reasoning: {{{{ reasoning_effort }}}}<|end|>{TURNS}{OPEN}"  # of gpt-oss
EFFORTS: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "the cat"}], "max_completion_tokens": 8}


def with_markers(folder: Path) -> Path:
    config = folder / "tokenizer_config.json"
    text = config.read_text("utf-8").rstrip().removesuffix("}")
    config.write_text(text + ', "reasoning_markers": ["<think>", "</think>"]}', "utf-8")
    return folder


def reasons(folder: Path, template: str, *, marked: bool) -> dict[Effort, Reasons | None]:
    """None where it is refused."""
    made = make_tokenizer(folder, template=template)
    tokenizer = Tokenizer(with_markers(made) if marked else made)
    found: dict[Effort, Reasons | None] = {}
    for effort in EFFORTS:
        try:
            found[effort] = reasons_of(effort, tokenizer)
        except ApiError:
            found[effort] = None
    return found


def test_a_model_that_does_not_reason_does_so_with_no_effort_and_refuses_more(tmp_path: Path) -> None:
    found = reasons(tmp_path, TURNS + OPEN, marked=True)  # it has the markers, and was never told to use them
    assert found == {effort: Reasons() if effort in ("none", "minimal") else None for effort in EFFORTS}


def test_a_model_that_always_reasons_is_given_so_many_tokens(tmp_path: Path) -> None:
    found = reasons(tmp_path, ALWAYS, marked=True)
    assert found == {effort: Reasons(tokens=TOKENS.get(effort), is_apart=True) for effort in EFFORTS}
    assert [TOKENS.get(effort) for effort in EFFORTS] == [0, 0, 1024, 4096, None, None, None]


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_template_with_a_switch_is_told_whether_to_reason(tmp_path: Path, name: str) -> None:
    found = reasons(tmp_path, SWITCHED.replace("enable_thinking", name), marked=True)
    assert found["none"] == found["minimal"] == Reasons({name: False})
    assert found["low"] == Reasons({name: True}, 1024, is_apart=True)
    assert found["high"] == Reasons({name: True}, None, is_apart=True)


def test_a_template_that_reads_the_effort_is_told_it(tmp_path: Path) -> None:
    found = reasons(tmp_path, LEVELS, marked=False)
    assert found == {effort: Reasons({"reasoning_effort": effort}) for effort in EFFORTS}


class Asked:
    """A client of a server, and what its engine was asked for last."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client
        self.params = SamplingParams()
        self.num_prompt_tokens = 0

    def constraint(self) -> object:
        return self.params.constraint

    def ask(self, /, page: str = "/v1/chat/completions", **more: object) -> httpx2.Response:
        base = {"input": "the cat", "max_output_tokens": 8} if page == "/v1/responses" else CHAT
        return self.client.post(page, json=base | more)


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Of a model whose template has the switch."""
    folder = make_model(tmp_path_factory.mktemp("reasons") / "model", sharpness=3.0)
    with_markers(make_tokenizer(folder, template=SWITCHED))
    with Engine(folder, kv_tokens=2048) as engine, serving(engine) as url, httpx2.Client(base_url=url) as client:
        asked, start = Asked(client), engine.backend.start

        def noted(ids: TokenIds, params: SamplingParams, *rest: object, **options: object) -> Generation:
            asked.params, asked.num_prompt_tokens = params, len(ids)
            return start(ids, params, *rest, **options)  # type: ignore[arg-type]  # what it was given

        engine.backend.start = noted  # type: ignore[method-assign]  # of this one engine
        yield asked


def test_an_effort_is_a_budget_and_a_word_to_the_template(reasoner: Asked) -> None:
    assert reasoner.ask(reasoning_effort="low").status_code == 200
    assert reasoner.constraint() == Reasoned("<think>", "</think>", 1024)
    thinking = reasoner.num_prompt_tokens
    assert reasoner.ask(reasoning_effort="low", reasoning_tokens=3, regex="yes").status_code == 200
    assert reasoner.constraint() == Reasoned("<think>", "</think>", 3, Regex("yes")), "the budget that is given"
    assert reasoner.ask(reasoning_effort="none").status_code == 200
    assert reasoner.constraint() is None
    assert reasoner.num_prompt_tokens > thinking, "the template closes the reasoning"
    assert reasoner.ask(reasoning_effort="high").status_code == 200
    assert (reasoner.constraint(), reasoner.num_prompt_tokens) == (None, thinking)


def test_reasoning_that_was_asked_for_is_told_apart(reasoner: Asked) -> None:
    told = reasoner.ask(reasoning_effort="medium", reasoning_tokens=2, regex="yes", max_completion_tokens=60)
    message = told.json()["choices"][0]["message"]
    assert message["content"] == "yes"
    assert message["reasoning_content"] != ""


def test_fields_that_disagree_with_the_effort_are_refused(reasoner: Asked) -> None:
    wrong: tuple[tuple[dict[str, object], str], ...] = (
        ({"reasoning_tokens": 5, "reasoning_effort": "none"}, "disagree"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "give one"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    )
    for more, said in wrong:
        error = reasoner.ask("/v1/chat/completions", **more).json()["error"]
        assert error["param"] == "reasoning_effort"
        assert said in error["message"]
    agreed = reasoner.ask(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="none")
    assert agreed.status_code == 200


def test_responses_take_an_effort_and_tell_it(reasoner: Asked) -> None:
    told = reasoner.ask("/v1/responses", reasoning={"effort": "none", "summary": "auto"})
    assert told.status_code == 200, told.text
    assert told.json()["reasoning"] == {"effort": "none", "summary": None}
    assert reasoner.constraint() is None
    assert reasoner.ask("/v1/responses", reasoning={"effort": "low"}).status_code == 200
    assert reasoner.constraint() == Reasoned("<think>", "</think>", 1024)
    for options, said in (({"summary": "detailed"}, "not summed up"), ({"effort": "much"}, "effort")):
        error = reasoner.ask("/v1/responses", reasoning=options).json()["error"]
        assert error["param"].startswith("reasoning.")
        assert said in error["message"]


def test_openais_client_asks_for_an_effort_of_a_model_that_has_none(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "the"}]
        answer = ai.chat.completions.create(
            model="toy", messages=messages, max_completion_tokens=2, reasoning_effort="none", verbosity="medium",
            function_call="none", prompt_cache_retention="in_memory", safety_identifier="me", service_tier="auto",
        )  # fmt: skip
        assert answer.usage is not None
        with pytest.raises(openai.BadRequestError, match="does not reason"):
            ai.chat.completions.create(model="toy", messages=messages, reasoning_effort="high")
        with pytest.raises(openai.BadRequestError, match="does not reason") as refused:
            ai.responses.create(model="toy", input="the", reasoning={"effort": "high"})
    assert refused.value.param == "reasoning.effort"


@pytest.mark.parametrize(
    ("page", "more", "param", "said"),
    [
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity", "say in a message how long"),
        ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity", "say in a message how long"),
        ("/v1/chat/completions", {"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions", "tools"),
        ("/v1/chat/completions", {"log_metrics": False}, "log_metrics", "leave it out"),
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, "prompt_cache_retention", "in_memory"),
        ("/v1/responses", {"background": True}, "background", "leave it out"),
    ],
)
def test_what_cannot_be_given_is_refused_in_words(
    client: httpx2.Client, page: str, more: dict[str, object], param: str, said: str
) -> None:
    base = {"input": "the"} if page == "/v1/responses" else CHAT
    answer = client.post(page, json=base | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("page", "more"),
    [
        ("/v1/chat/completions", {"log_metrics": True, "custom_params": None, "functions": []}),
        ("/v1/completions", {"log_metrics": True}),
        ("/generate", {"log_metrics": True, "sampling_params": {"max_new_tokens": 1, "custom_params": None}}),
        (
            "/v1/responses",
            {"text": {"verbosity": "medium"}, "background": False, "prompt_cache_retention": None},
        ),
    ],
)
def test_what_asks_for_what_is_so_is_taken(client: httpx2.Client, page: str, more: dict[str, object]) -> None:
    bases: dict[str, dict[str, object]] = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "the", "max_tokens": 1},
        "/generate": {"text": "the"},
        "/v1/responses": {"input": "the", "max_output_tokens": 1},
    }
    answer = client.post(page, json=bases[page] | more)
    assert answer.status_code == 200, answer.text


def test_a_refusal_in_a_history_is_what_was_said(client: httpx2.Client) -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    for turn in ({"content": None, "refusal": "I will not."}, {"content": [part]}, {"content": "I will not."}):
        said = ChatMessage.model_validate({"role": "assistant", "refusal": None} | turn).message()
        assert (said.role, said.content) == ("assistant", "I will not.")
        turns = [{"role": "user", "content": "Do."}, {"role": "assistant"} | turn, {"role": "user", "content": "Why?"}]
        assert client.post("/v1/chat/completions", json=CHAT | {"messages": turns}).status_code == 200
    answer = client.post(
        "/v1/responses",
        json={"input": [{"type": "message", "role": "assistant", "content": [part]}], "max_output_tokens": 1},
    )
    assert answer.status_code == 200, answer.text
    items = client.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
    assert items[0]["content"] == [part]


def test_only_an_assistant_refuses(client: httpx2.Client) -> None:
    part = {"type": "refusal", "refusal": "no"}
    for turn, param in (
        ({"content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"content": [part]}, "messages[0]"),
    ):
        error = client.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user"} | turn]}).json()["error"]
        assert error["param"].startswith(param)
        assert "assistant" in error["message"]
    error = client.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]}).json()["error"]
    assert "assistant" in error["message"]
