"""Whatever a client sends, it gets an answer in OpenAI's form that names what is wrong: never a 5xx, never a 422."""

from __future__ import annotations

import json
import random
import socket

import httpx2
import pytest

import niwaki as nw
from niwaki.lang.endpoint import Endpoint
from niwaki.lang.state import State
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.openai_models import CompletionRequest
from niwaki.runtime.server.serve import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "the cat"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@nw.function
def echo(s: State, text: str) -> str:
    return text


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("n_predict", 4, "unknown field 'n_predict'; it is called 'max_tokens' here"),
        ("repeat_penalty", 1.1, "unknown field 'repeat_penalty'; it is called 'repetition_penalty' here"),
        ("cache_prompt", True, "unknown field 'cache_prompt'; leave it out: what prompts share is computed once"),
        (
            "response_format",
            {"type": "json_object", "schema": {"type": "object"}},
            "unknown field 'response_format.schema'; write {'type': 'json_schema', 'json_schema': ",
        ),
        ("qqq", 1, "unknown field 'qqq'"),
    ],
)
def test_a_field_of_another_server_is_told_by_its_name_here(
    client: httpx2.Client, field: str, value: object, meant: str
) -> None:
    error = refused(client.post(CHAT, json={"messages": USER, field: value}))
    assert str(error["message"]).startswith(meant)
    assert error["code"] == "extra_forbidden"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 17), ("n", "1"), ("n", 1.5), ("n", True),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "0"),
        ("top_p", -0.1), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5),
        ("frequency_penalty", -2.1), ("presence_penalty", 2.1), ("repetition_penalty", 0),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**400), ("max_completion_tokens", 0),
        ("top_logprobs", 21),
        ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {str(i): 1 for i in range(301)}),
        ("seed", 2**63), ("stop", ""), ("stop", ["a"] * 33), ("stop", [""]), ("stop", 5),
        ("stream", "yes"), ("stream_options", {"else": 1}), ("messages", []), ("messages", "hi"),
        ("regex", ""), ("choices", []), ("user", "u" * 257), ("cache_salt", 1),
        ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"),
        ("functions", [{"name": "f"}]), ("reasoning_effort", "low"), ("audio", {"voice": "x"}),
        ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
        ("no_such_field", 1), ("model", 5),
    ],
)  # fmt: skip
def test_a_field_out_of_its_bounds_is_named(client: httpx2.Client, field: str, value: object) -> None:
    error = refused(client.post(CHAT, content=json.dumps({"messages": USER, field: value}), headers=JSON))
    assert str(error["param"]).startswith(field)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_named(client: httpx2.Client, messages: object, param: str) -> None:
    assert refused(client.post(CHAT, json={"messages": messages}))["param"] == param


def test_an_answer_of_another_server_that_lists_no_calls_is_taken_back(client: httpx2.Client) -> None:
    said = [*USER, {"role": "assistant", "content": "a", "tool_calls": []}, *USER]
    told = client.post(CHAT, json={"messages": said, "max_tokens": 1})
    assert told.status_code == 200
    plain = client.post(CHAT, json={"messages": [*USER, {"role": "assistant", "content": "a"}, *USER], "max_tokens": 1})
    assert told.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_what_is_no_text_is_refused_as_such(client: httpx2.Client, kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}]
    said = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}))
    assert said["param"] == "messages[0].content[1].type"
    assert "no images, sound, video or files" in str(said["message"])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
    assert "no images" in str(refused(client.post("/v1/responses", json={"input": [item]}))["message"])
    other = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "poem"}]}]}))
    assert "Input should be 'text'" in str(other["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"{}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": NaN}}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\udc00"}',
        b'{"messages": ' + b"[" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_good_json_is_refused(client: httpx2.Client, body: bytes) -> None:
    refused(client.post(CHAT, content=body, headers=JSON))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"regex": "a", "choices": ["a"]}, "choices"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_spacing": "spaced"}, "json_spacing"),
        ({"json_spacing": "wide", "json_schema": "{}"}, "json_spacing"),
        ({"grammar": "start: x"}, "grammar"),
        ({"regex": "a{3"}, "regex"),
        ({"regex": "a\x00"}, "regex"),
        ({"max_tokens": 600}, "messages"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
    ],
)
def test_what_only_the_whole_body_shows_is_refused_before_anything_runs(
    client: httpx2.Client, engine: Engine, more: dict[str, object], param: str
) -> None:
    steps = engine.stats()["steps"]
    error = refused(client.post(CHAT, json={"messages": USER, "stream": "stream_options" not in more} | more))
    assert error["param"] == param
    assert engine.stats()["steps"] == steps


def test_a_prompt_that_can_never_fit_is_refused_at_once(client: httpx2.Client) -> None:
    for body in ({"messages": [{"role": "user", "content": "the cat " * 5000}]}, {"prompt": [5] * 513}):
        path = CHAT if "messages" in body else COMPLETIONS
        assert refused(client.post(path, json=body))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [400], [[5], [2**31]], ["a", 5], [5, "a"], [1.5], None, [None]])
def test_a_prompt_of_wrong_ids_is_refused(client: httpx2.Client, prompt: object) -> None:
    assert str(refused(client.post(COMPLETIONS, json={"prompt": prompt}))["param"]).startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "param", "told"),
    [
        ([[5]] * 257, "prompt", "at most 256 items"),
        ([], "prompt", "at least 1 item"),
        ([[5], []], "prompt[1]", "at least 1 item"),
        ([5, -1], "prompt[1]", "greater than or equal to 0"),
        (["a", 5], "prompt[1]", "valid string"),
    ],
)
def test_a_value_of_several_types_is_told_what_the_nearest_one_wants(
    client: httpx2.Client, prompt: object, param: str, told: str
) -> None:
    error = refused(client.post(COMPLETIONS, json={"prompt": prompt}))
    assert error["param"] == param
    assert told in str(error["message"])


@pytest.mark.parametrize(
    ("page", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ],
)
def test_a_field_is_named_as_the_body_spells_it(
    client: httpx2.Client, page: str, body: dict[str, object], param: str
) -> None:
    head = {"messages": USER} if page == CHAT else {}
    assert refused(client.post(page, json=head | body))["param"] == param


def test_a_million_wrong_elements_are_one_short_error(client: httpx2.Client) -> None:
    body = b'{"prompt": [' + b'"",1,' * 300_000 + b"1]}"
    answer = client.post(COMPLETIONS, content=body, headers=JSON)
    refused(answer)
    assert len(answer.content) < 1000


def test_no_text_of_a_body_is_kept_for_the_next_one() -> None:
    """Of all requests, and of all clients."""
    said = '"nobody says this twice"'
    pairs = [
        [CompletionRequest.model_validate_json(f'{{"prompt": {said}}}').prompt for _ in range(2)],
        [Endpoint(echo).body.model_validate_json(f'{{"text": {said}}}').model_dump()["p0"] for _ in range(2)],
    ]
    for one, other in pairs:
        assert one == other
        assert one is not other


@pytest.mark.parametrize(
    ("page", "body", "param"),
    [
        (CHAT, {"messages": USER, "response_format": {"type": "x" * 100_000}}, "response_format"),
        ("/v1/responses", {"input": [{"type": "x" * 100_000}]}, "input[0]"),
    ],
)
def test_an_object_of_no_known_kind_is_told_which_there_are_and_not_itself(
    client: httpx2.Client, page: str, body: dict[str, object], param: str
) -> None:
    answer = client.post(page, json=body)
    error = refused(answer)
    assert error["param"] == param
    assert "x' is none of '" in str(error["message"])
    assert len(answer.content) < 1000


def test_the_body_is_measured_while_it_is_read(client: httpx2.Client) -> None:
    def endless() -> object:
        for _ in range(5000):
            yield b" " * 1024

    refused(client.post(CHAT, content=endless(), headers=JSON), 413)  # type: ignore[arg-type]  # any iterator of bytes
    refused(client.post(CHAT, content=b" " * (4 * 2**20 + 1), headers=JSON), 413)


def test_a_body_that_says_that_it_is_too_long_is_not_waited_for(url: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    address = httpx2.URL(url)
    with socket.create_connection((address.host, address.port or 0), timeout=20) as slow:
        slow.sendall(head + b"content-length: 99999999999\r\n\r\n{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_waited_for_so_long_and_no_longer(engine: Engine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(engine, ServerConfig(port=0, body_seconds=0.2)) as url:
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port or 0), timeout=60) as slow:
            slow.sendall(head + b"content-length: 9\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_what_is_no_plain_json_is_another_media_type(client: httpx2.Client) -> None:
    refused(client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    refused(client.post(CHAT, content=b"{}", headers=JSON | {"content-encoding": "gzip"}), 415)


def test_no_body_at_all_is_told_so(client: httpx2.Client) -> None:
    for page in (CHAT, "/generate", "/v1/sessions"):
        error = refused(client.post(page), 400)
        assert (error["code"], "there is no body" in str(error["message"])) == ("missing", True)
    refused(client.post("/v1/sessions", content=b"", headers={"content-type": "text/plain"}), 415)


def test_unknown_pages_methods_and_models_are_told_in_the_same_form(client: httpx2.Client) -> None:
    refused(client.get("/v1/no-such-page"), 404)
    refused(client.get("/v1/responses"), 405)
    refused(client.get(CHAT), 405)
    assert client.get(CHAT).headers["allow"] == "POST"
    refused(client.get("/v1/models/"), 404)
    assert refused(client.post(CHAT, json={"messages": USER, "model": "gpt-4"}), 404)["code"] == "model_not_found"


def test_random_bodies_never_break_the_server(client: httpx2.Client) -> None:
    draw = random.Random(5)
    atoms: list[object] = [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        "",
        "the",
        "\u0000",
        [],
        {},
        ["a"],
        [5],
        {"a": 1},
        [[5]],
        [None],
    ]
    pages: dict[str, list[str]] = {
        CHAT: "messages model n temperature stop stream logprobs top_logprobs seed regex max_tokens tools".split(),
        COMPLETIONS: "prompt model n echo logprobs stop stream max_tokens logit_bias choices suffix".split(),
        "/generate": "text input_ids sampling_params stream rid return_logprob logprob_start_len".split(),
        "/tokenize": "prompt add_special_tokens model".split(),
        "/detokenize": "tokens model".split(),
    }
    for _ in range(150):
        page = draw.choice(sorted(pages))
        body = {name: draw.choice(atoms) for name in draw.choices(pages[page], k=draw.randint(0, 3))}
        if page == CHAT:  # bounded, or the rest of the context would be generated each time
            body = {"max_tokens": 2, **body} | ({"messages": USER} if draw.random() < 0.5 else {})
        answer = client.post(page, json=body)
        assert answer.status_code in (200, 400, 404), (page, body, answer.text)
