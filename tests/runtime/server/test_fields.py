"""Every field of a request reaches the engine, on each page by the name that it has there."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping

import httpx2
import openai
import pytest
from pydantic import BaseModel

from niwaki.runtime.api import Choices, Constraint, Generation, Grammar, JsonSchema, Regex, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.other_servers import INSTEAD, ChatFieldsOfOthers, FieldsOfOthers, GenerateFieldsOfOthers
from niwaki.runtime.server.wire import MAX_PATTERN

PROMPTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_completion_tokens": 3},
    "/generate": {"text": "the"},
}
# As OpenAI's pages have it, and what the engine is asked.
SAMPLING: dict[str, tuple[object, object]] = {
    "temperature": (0.7, 0.7),
    "top_p": (0.6, 0.6),
    "top_k": (7, 7),
    "min_p": (0.05, 0.05),
    "frequency_penalty": (0.3, 0.3),
    "presence_penalty": (0.2, 0.2),
    "repetition_penalty": (1.3, 1.3),
    "logit_bias": ({"9": 1.5}, ((9, 1.5),)),
    "min_tokens": (2, 2),
    "seed": (5, 5),
    "stop": (["never there"], ("never there",)),
    "stop_token_ids": ([7], (7,)),
    "ignore_eos": (True, True),
}
OF_OPENAI: dict[str, tuple[object, object]] = {"stop_regex": ("zq", "zq"), "priority": (3, 3)}
OF_SGLANG = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}

Asked = Callable[[str, Mapping[str, object]], SamplingParams]


@pytest.fixture
def asked(client: httpx2.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the engine is asked for when a page is sent a body."""
    found: list[SamplingParams] = []
    start = engine.backend.start

    def noted(ids: TokenIds, params: SamplingParams, *more: object, **options: object) -> Generation:
        found.append(params)
        return start(ids, params, *more, **options)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(engine.backend, "start", noted)

    def ask(page: str, body: Mapping[str, object]) -> SamplingParams:
        answer = client.post(page, json={**PROMPTS[page], **body})
        assert answer.status_code == 200, answer.text
        return found[-1]

    return ask


@pytest.mark.parametrize("page", ["/v1/completions", "/v1/chat/completions"])
def test_what_openais_pages_are_told_the_engine_is_asked(asked: Asked, page: str) -> None:
    expected = SAMPLING | OF_OPENAI
    params = asked(page, {name: said for name, (said, _) in expected.items()})
    assert {name: getattr(params, name) for name in expected} == {name: meant for name, (_, meant) in expected.items()}
    assert params.max_new_tokens == 3
    assert asked(page, {"seed": -1}).seed == 2**63 - 1, "a negative seed is a seed, too"
    assert asked(page, {"top_k": 0}).top_k == -1, "vLLM's spelling of none"


def test_what_generate_is_told_the_engine_is_asked(asked: Asked) -> None:
    expected = SAMPLING | OF_OPENAI
    told = {OF_SGLANG.get(name, name): said for name, (said, _) in expected.items()}
    body: dict[str, object] = {"priority": told.pop("priority"), "sampling_params": told | {"max_new_tokens": 3}}
    params = asked("/generate", body)
    assert {name: getattr(params, name) for name in expected} == {name: meant for name, (_, meant) in expected.items()}
    assert params.max_new_tokens == 3
    both = (["(?i)zq", "z|y"], "(?i:zq)|(?:z|y)")  # flags of one hold for it alone
    for patterns, meant in (([], None), (["(?i)zq+"], "(?i)zq+"), (["zq", "z|y"], "(?:zq)|(?:z|y)"), both):
        assert asked("/generate", {"sampling_params": {"stop_regex": patterns}}).stop_regex == meant


def test_constraints_of_generate_are_those_of_its_names(asked: Asked, client: httpx2.Client) -> None:
    schema, ebnf = '{"enum": ["yes"]}', 'root ::= "yes"'
    for name, said, meant in (
        ("regex", "yes", Regex("yes")),
        ("json_schema", schema, JsonSchema(schema)),
        ("ebnf", ebnf, Grammar(ebnf, "ebnf")),
    ):
        assert asked("/generate", {"sampling_params": {name: said, "max_new_tokens": 9}}).constraint == meant
    two = {"text": "the", "sampling_params": {"regex": "a", "ebnf": ebnf}}
    assert "at most one" in client.post("/generate", json=two).json()["error"]["message"]


@pytest.mark.parametrize("page", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"guided_json": {"enum": ["yes"]}}, JsonSchema('{"enum": ["yes"]}')),
        ({"guided_json": '{"enum":["yes"]}', "json_spacing": "free"}, JsonSchema('{"enum":["yes"]}', "free")),
        ({"guided_regex": "yes"}, Regex("yes")),
        ({"guided_choice": ["yes", "no"]}, Choices(("yes", "no"))),
        ({"guided_grammar": 'root ::= "yes"'}, Grammar('root ::= "yes"', "ebnf")),
        ({"guided_grammar": 'start: "::="'}, Grammar('start: "::="', "lark")),
        ({"structured_outputs": {"json": {"enum": ["yes"]}}}, JsonSchema('{"enum": ["yes"]}')),
        ({"structured_outputs": {"regex": "yes"}}, Regex("yes")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Choices(("yes", "no"))),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, Grammar('start: "yes"', "lark")),
        ({"structured_outputs": {"json_object": True}}, JsonSchema('{"type":"object"}')),
        (
            {"structured_outputs": {"regex": "yes", "json": None, "disable_any_whitespace": False}, "bad_words": []},
            Regex("yes"),
        ),
    ],
)
def test_what_vllm_calls_otherwise_means_the_same(
    asked: Asked, page: str, sent: dict[str, object], meant: Constraint
) -> None:
    tokens = {"max_tokens": 8} if page == "/v1/completions" else {"max_completion_tokens": 8}
    assert asked(page, sent | tokens).constraint == meant


@pytest.mark.parametrize("page", ["/v1/completions", "/v1/chat/completions"])
def test_one_field_of_another_server_is_one_constraint(client: httpx2.Client, page: str) -> None:
    for body, param, said in (
        ({"guided_regex": "a", "regex": "b"}, "guided_regex", "at most one of regex and guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one of json, regex"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json, regex"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "a("),
    ):
        answer = client.post(page, json=PROMPTS[page] | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert said in answer.json()["error"]["message"]


def test_an_empty_line_costs_a_grammar_of_vllms_its_own_look_alone() -> None:
    began = time.process_time()
    named = FieldsOfOthers(guided_grammar="\n" * MAX_PATTERN).constraints_of_others(JsonSchema)
    assert named == {"guided_grammar": Grammar("\n" * MAX_PATTERN, "lark")}
    assert time.process_time() - began < 5.0, "0.01 s; where each looks through those behind it, half a minute"


def refused_fields() -> Iterator[tuple[str, str]]:
    """The page, and each field that other servers have there and this one has not."""
    pages: tuple[tuple[str, type[BaseModel]], ...] = (
        ("/v1/completions", FieldsOfOthers),
        ("/v1/chat/completions", FieldsOfOthers),
        ("/v1/chat/completions", ChatFieldsOfOthers),
        ("/generate", GenerateFieldsOfOthers),
    )
    for page, model in pages:
        yield from ((page, name) for name in model.model_fields if name in INSTEAD)


@pytest.mark.parametrize(("page", "name"), [*refused_fields()])
def test_a_field_of_another_server_is_refused_by_the_name_of_ours_unless_it_asks_for_nothing(
    client: httpx2.Client, page: str, name: str
) -> None:
    short = {"sampling_params": {"max_new_tokens": 1}} if page == "/generate" else {"max_tokens": 1}
    prompt = {name: value for name, value in PROMPTS[page].items() if not name.startswith("max")}
    refused = client.post(page, json=prompt | {name: ["something"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert INSTEAD[name] in error["message"]
    asking: tuple[object, ...] = (None, False, [])
    for nothing in asking:
        assert client.post(page, json=prompt | short | {name: nothing}).status_code == 200


@pytest.mark.parametrize(("page", "name"), [*((page, "cache_salt") for page in PROMPTS), ("/generate", "extra_key")])
def test_a_salt_splits_the_cache_on_every_page(client: httpx2.Client, page: str, name: str) -> None:
    text = f"{page} and {name} and the dog sat on the log beside " * 3
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in page else {"prompt": text}
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}} if page == "/generate" else prompt

    def cached(**more: str) -> int:
        told = client.post(page, json=PROMPTS[page] | body | more).json()
        details = told["meta_info"] if page == "/generate" else told["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    cached()
    assert cached() > 10
    one, other = f"{page} {name} one", f"{page} {name} other"
    assert cached(**{name: one}) == 0
    assert cached(**{name: one}) > 10
    assert cached(**{name: other}) == 0


def test_another_model_than_the_one_served_is_not_there(client: httpx2.Client) -> None:
    for page in ("/v1/completions", "/v1/chat/completions"):
        answer = client.post(page, json=PROMPTS[page] | {"model": "gpt-4"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post(page, json=PROMPTS[page] | {"model": "toy"}).status_code == 200


def test_usage_counts_a_prompt_once_however_many_answers_it_gets(client: httpx2.Client) -> None:
    body = {"prompt": ["the cat sat on the mat " * 4, "the dog"], "max_tokens": 2, "ignore_eos": True}
    for _ in range(2):  # the second time out of the cache
        one = client.post("/v1/completions", json=body).json()["usage"]
    three = client.post("/v1/completions", json=body | {"n": 3}).json()["usage"]
    assert one["prompt_tokens_details"]["cached_tokens"] > 10
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["prompt_tokens_details"] == one["prompt_tokens_details"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = client.post("/v1/completions", json=body | {"n": 3, "stream": True, "stream_options": options}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {one["prompt_tokens"]}
    assert chunks[-1]["usage"] == three
    details = [chunk["usage"]["prompt_tokens_details"] for chunk in chunks]
    assert details[0] is None, "not known yet, which is not 0"
    assert [told for told in details if told is not None] == [one["prompt_tokens_details"]] * 2


def test_echoed_prompts_stand_before_each_of_their_answers(client: httpx2.Client) -> None:
    body = {"prompt": ["the cat", "naïve 東京"], "n": 2, "echo": True, "max_tokens": 2, "seed": 1}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"].startswith(prompt) for choice, prompt in zip(
        choices, ["the cat", "the cat", "naïve 東京", "naïve 東京"], strict=True
    )] == [True] * 4  # fmt: skip


def test_offsets_say_where_each_token_of_the_text_begins(client: httpx2.Client) -> None:
    said = "語 and жж"  # characters of several tokens
    body = {"prompt": f"naïve {said} the cat", "logprobs": 0, "max_tokens": 40, "regex": f" {said} no"}
    whole, echoed = (
        client.post("/v1/completions", json=body | more).json()["choices"][0] for more in ({}, {"echo": True})
    )
    assert whole["text"] == f" {said} no"
    assert echoed["text"] == f"naïve {said} the cat {said} no"
    for choice in (whole, echoed):
        told = choice["logprobs"]
        whole_tokens = [
            (at, token)
            for at, token in zip(told["text_offset"], told["tokens"], strict=True)
            if not token.startswith(("bytes:", "<|"))
        ]
        assert len(whole_tokens) > 3
        for at, token in whole_tokens:
            assert choice["text"][at:].startswith(token)
        assert told["text_offset"] == sorted(told["text_offset"])
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    streamed = [at for chunk in chunks if chunk["logprobs"] for at in chunk["logprobs"]["text_offset"]]
    assert streamed == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize("page", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_field_of_openais_client_may_be_null(client: httpx2.Client, page: str) -> None:
    """Also those that are not here, which a frame around the client may write out."""
    with openai.OpenAI(api_key="none") as ai:
        create: dict[str, Callable[..., object]] = {
            "/v1/completions": ai.completions.create,
            "/v1/chat/completions": ai.chat.completions.create,
            "/v1/responses": ai.responses.create,
        }
        names = set(inspect.signature(create[page]).parameters) - {"timeout"}
    body = {"input": "the", "max_output_tokens": 3} if page == "/v1/responses" else PROMPTS[page]
    fields = {name: None for name in names if not name.startswith("extra_")}
    assert len(fields) > 15
    answer = client.post(page, json=fields | body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("page", "asks", "refused"),
    [
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}, False),
        ("/v1/chat/completions", {"add_generation_prompt": True}, False),
        ("/v1/chat/completions", {"add_generation_prompt": False}, True),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": False}}, False),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": True}}, True),
        ("/v1/responses", {"stream": True, "stream_options": {"include_obfuscation": False}}, False),
        ("/v1/responses", {"stream": True, "stream_options": {"include_obfuscation": True}}, True),
        ("/v1/responses", {"top_logprobs": 0}, False),
        ("/v1/responses", {"top_logprobs": 1}, True),
        ("/v1/responses", {"prompt_cache_retention": "24h"}, True),
    ],
)
def test_a_field_that_asks_for_what_is_here_is_taken(
    client: httpx2.Client, page: str, asks: dict[str, object], refused: bool
) -> None:
    body = {"input": "the", "max_output_tokens": 3} if page == "/v1/responses" else PROMPTS[page]
    if "continue_final_message" in asks:
        body = body | {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]}
    answer = client.post(page, json=body | asks)
    assert answer.status_code == (400 if refused else 200), answer.text
    if refused:
        assert answer.json()["error"]["param"].startswith(list(asks)[-1])


WORDS = {"type": "text", "text": "the"}
CALL: dict[str, object] = {"name": "f", "arguments": "{}"}
# Of OpenAI's, vLLM's and others' clients: they ask for what is so, or change no answer.
TAKEN: list[dict[str, object]] = [
    {"prediction": {"type": "content", "content": "the cat"}},
    {"prediction": {"type": "content", "content": [WORDS]}},
    {"messages": [{"role": "user", "content": [WORDS | {"cache_control": {"type": "ephemeral"}}]}]},
    {"messages": [{"role": "user", "content": [WORDS | {"prompt_cache_breakpoint": {"mode": "explicit"}}]}]},
    {"messages": [{"role": "assistant", "content": "a", "reasoning": "b"}, {"role": "user", "content": "the"}]},
    {"include_reasoning": True},
    {"add_special_tokens": False, "echo": False, "length_penalty": 1.0, "early_stopping": False},
    {"return_token_ids": False, "return_tokens_as_token_ids": False},
    {"mm_processor_kwargs": None, "kv_transfer_params": None, "vllm_xargs": None},
]
# They cannot be meant here, and the refusal says which field it is and what there is instead.
REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"include_reasoning": False}, "include_reasoning", "leave it unread"),
    ({"add_special_tokens": True}, "add_special_tokens", "does not support"),
    ({"echo": True}, "echo", "/v1/completions"),
    ({"length_penalty": 0.5}, "length_penalty", "beam search"),
    ({"return_token_ids": True}, "return_token_ids", "/generate"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    (
        {"messages": [{"role": "assistant", "content": None, "function_call": CALL}]},
        "messages[0].function_call",
        "tools",
    ),
]


@pytest.mark.parametrize("more", TAKEN, ids=["+".join(more) + str(place) for place, more in enumerate(TAKEN)])
def test_what_changes_no_answer_is_taken(client: httpx2.Client, more: Mapping[str, object]) -> None:
    body = PROMPTS["/v1/chat/completions"] | dict(more)
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("more", "param", "why"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_cannot_be_meant_is_refused_by_its_place(
    client: httpx2.Client, more: Mapping[str, object], param: str, why: str
) -> None:
    answer = client.post("/v1/chat/completions", json=PROMPTS["/v1/chat/completions"] | dict(more))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]
