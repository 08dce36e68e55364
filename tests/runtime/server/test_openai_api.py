"""OpenAI's API through real clients: what is asked is what is done, and streams say what the whole answer says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from niwaki.runtime.api import ConfigError, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.openai_models import CompletionRequest
from niwaki.runtime.server.serve import serving

END = 1  # the toy's token that ends a text
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat?"},
]


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def events(text: str) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_served_model_is_listed(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["toy"]
    assert ai.models.retrieve("toy").owned_by == "niwaki"
    with pytest.raises(openai.NotFoundError, match="toy"):
        ai.models.retrieve("gpt-4")


def test_the_model_is_known_by_the_names_that_it_was_given(engine: Engine) -> None:
    config = ServerConfig(port=0, model_names=("team/llama", "gpt-4"))
    with serving(engine, config) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["team/llama", "gpt-4"]
        assert client.models.retrieve("team/llama").id == "team/llama"
        for name in ("team/llama", "gpt-4", "default"):
            answer = client.chat.completions.create(model=name, messages=MESSAGES, max_completion_tokens=1)
            assert answer.model == "team/llama"
        assert client.responses.create(model="gpt-4", input="the", max_output_tokens=1).model == "team/llama"
        with pytest.raises(openai.NotFoundError, match="'team/llama' or 'gpt-4' only"):
            client.chat.completions.create(model="toy", messages=MESSAGES)
    with pytest.raises(ConfigError, match="name must not be empty"):
        ServerConfig(model_names=("",))


def test_a_chat_answer_is_what_the_engine_says_to_the_rendered_prompt(ai: openai.OpenAI, engine: Engine) -> None:
    answer = ai.chat.completions.create(model="toy", messages=MESSAGES, temperature=0, max_completion_tokens=12)
    # A content is text even where it spells markers: those of the template are encoded apart.
    ids = engine.tokenizer.encode(_rendered(engine), at_start=True)
    expected = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 12})
    assert isinstance(expected, dict)
    meta = expected["meta_info"]
    assert isinstance(meta, dict)
    assert answer.choices[0].message.content == expected["text"]
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == meta["completion_tokens"]


def test_an_answer_goes_on_with_the_last_message_where_asked(client: httpx2.Client, engine: Engine) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "the dog sat"}]
    body = {"messages": begun, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=body).json()
    ids = engine.tokenizer.encode([*_rendered(engine), Segment("the dog sat")], at_start=True)
    expected = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert isinstance(expected, dict)
    assert answer["choices"][0]["message"]["content"] == expected["text"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    refused = client.post("/v1/chat/completions", json=body | {"messages": MESSAGES})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def _rendered(engine: Engine) -> list[Segment]:
    return [
        Segment("<|bos|><|system|>", control=True),
        Segment("the cat"),
        Segment("<|end|><|user|>", control=True),
        Segment("sat on the mat?"),
        Segment("<|end|><|assistant|>", control=True),
    ]


def test_the_second_time_the_prompt_comes_out_of_the_cache(ai: openai.OpenAI) -> None:
    def cached() -> int:
        answer = ai.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert cached() > 5


def test_a_salt_keeps_a_prompt_out_of_the_shared_cache(client: httpx2.Client) -> None:
    body = {"prompt": "the dog sat on the log " * 4, "max_tokens": 1}

    def cached(**more: object) -> object:
        return client.post("/v1/completions", json=body | more).json()["usage"]["prompt_tokens_details"]

    cached()
    assert cached() != {"cached_tokens": 0}
    assert cached(cache_salt="a") == {"cached_tokens": 0}
    assert cached(cache_salt="a") != {"cached_tokens": 0}
    assert cached(cache_salt="b") == {"cached_tokens": 0}


def test_the_deltas_of_a_stream_add_up_to_the_whole_answer(ai: openai.OpenAI) -> None:
    whole = ai.chat.completions.create(model="toy", messages=MESSAGES, seed=7, max_tokens=24, temperature=1.5)
    stream = ai.chat.completions.create(
        model="toy", messages=MESSAGES, seed=7, max_tokens=24, temperature=1.5, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_or_with_every_chunk_as_asked(client: httpx2.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "ignore_eos": True, "stream": True}
    last = events(client.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}).text)
    assert last[-1]["choices"] == []
    assert [chunk["usage"] for chunk in last[:-1]] == [None] * (len(last) - 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = events(client.post("/v1/chat/completions", json=body | {"stream_options": options}).text)
    counts = [dict(chunk["usage"])["completion_tokens"] for chunk in running]  # type: ignore[call-overload]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert dict(running[-1]["usage"])["total_tokens"] == dict(last[-1]["usage"])["total_tokens"]  # type: ignore[call-overload]


def test_a_sign_that_python_takes_for_the_end_of_a_line_cuts_no_event(client: httpx2.Client) -> None:
    text = "a\u2028b\x85c\u2029d"
    for page, body in (
        ("/v1/completions", {"prompt": "the", "choices": [text]}),
        ("/v1/responses", {"input": "the", "text": {"format": const(text)}}),
    ):
        with client.stream("POST", page, json=body | {"stream": True}) as answer:
            told = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert text in said_by(told)


def const(text: str) -> dict[str, object]:
    return {"type": "json_schema", "name": "a", "schema": {"const": text}}


def said_by(told: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["text"] if "choices" in one else str(one.get("delta", "")) for one in told)


def test_n_answers_are_those_of_n_seeds_in_a_row(ai: openai.OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str | None]:
        answer = ai.chat.completions.create(
            model="toy", messages=MESSAGES, seed=seed, n=n, max_tokens=8, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    assert texts(40, 3) == [*texts(40, 1), *texts(41, 1), *texts(42, 1)]


def test_every_one_of_n_answers_is_streamed(ai: openai.OpenAI) -> None:
    asked = {"model": "toy", "messages": MESSAGES, "seed": 3, "n": 3, "max_tokens": 8, "temperature": 1.5}
    whole = ai.chat.completions.create(**asked)  # type: ignore[call-overload]
    texts = ["", "", ""]
    for chunk in ai.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_logprobs_name_every_token_and_its_rivals_streamed_or_not(ai: openai.OpenAI) -> None:
    asked = {"model": "toy", "messages": MESSAGES, "temperature": 0, "max_tokens": 5, "logprobs": True}
    answer = ai.chat.completions.create(**asked, top_logprobs=3)  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy: the likeliest is the chosen one
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    streamed = []
    for chunk in ai.chat.completions.create(**asked, top_logprobs=3, stream=True):  # type: ignore[call-overload]
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in streamed)


def test_a_stop_string_ends_the_text_before_it(ai: openai.OpenAI) -> None:
    asked = {"model": "toy", "prompt": "the", "temperature": 0, "max_tokens": 30}
    text = ai.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
    stop = text[5:8]
    cut = ai.completions.create(**asked, stop=[stop, "never there"]).choices[0]  # type: ignore[call-overload]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.matched_stop == stop


def test_regex_and_choices_bound_what_comes_out(client: httpx2.Client) -> None:
    body = {"prompt": "the", "max_tokens": 20, "temperature": 1.5, "n": 4}
    dates = client.post("/v1/completions", json=body | {"regex": r"\d{2}-\d{2}"}).json()
    assert all(re.fullmatch(r"\d{2}-\d{2}", choice["text"]) for choice in dates["choices"])
    picked = client.post("/v1/completions", json=body | {"choices": ["cat", "dog"]}).json()
    assert {choice["text"] for choice in picked["choices"]} <= {"cat", "dog"}


def test_logit_bias_and_penalties_reach_the_sampler(client: httpx2.Client, engine: Engine) -> None:
    token = engine.tokenizer.encode([Segment("a")])[0]
    body = {"prompt": "the", "max_tokens": 5, "temperature": 0, "logprobs": 0}
    biased = client.post("/v1/completions", json=body | {"logit_bias": {str(token): 100}}).json()
    assert len(set(biased["choices"][0]["logprobs"]["tokens"])) == 1
    penalised = body | {
        "logit_bias": {str(token): 5},
        "repetition_penalty": 10,
        "presence_penalty": 2,
        "max_tokens": 20,
    }
    tokens = client.post("/v1/completions", json=penalised).json()["choices"][0]["logprobs"]["tokens"]
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("narrow", [{"top_p": 0}, {"top_k": 1}, {"min_p": 1}])
def test_one_token_to_draw_from_is_greedy(client: httpx2.Client, narrow: dict[str, int]) -> None:
    body = {"prompt": "the", "max_tokens": 8, "ignore_eos": True}
    greedy = client.post("/v1/completions", json=body | {"temperature": 0}).json()
    drawn = client.post("/v1/completions", json=body | {"temperature": 1} | narrow).json()
    assert greedy["choices"][0]["text"] == drawn["choices"][0]["text"]


def test_an_answer_ends_not_before_its_least_tokens(client: httpx2.Client) -> None:
    body = {"prompt": "the", "max_tokens": 8, "temperature": 0, "logit_bias": {str(END): 100}}
    used = [
        client.post("/v1/completions", json=body | least).json()["usage"]["completion_tokens"]
        for least in ({}, {"min_tokens": 5}, {"ignore_eos": True})
    ]
    assert used == [1, 6, 8]


def test_priority_reaches_the_engine() -> None:
    said = CompletionRequest.model_validate({"prompt": "the", "priority": -3})
    assert said.options(8, None).priority == -3


def test_completions_take_texts_and_token_ids_alone_or_many(ai: openai.OpenAI, engine: Engine) -> None:
    texts = ["the cat", "the dog sat"]
    ids = [engine.tokenizer.encode([Segment(text)], at_start=True) for text in texts]

    def answers(prompt: object) -> list[str]:
        found = ai.completions.create(model="toy", prompt=prompt, temperature=0, max_tokens=6)  # type: ignore[call-overload]
        return [choice.text for choice in found.choices]

    assert answers(texts) == answers(ids) == [*answers(texts[0]), *answers(ids[1])]


def test_echo_with_logprobs_scores_a_prompt_as_evaluation_harnesses_ask(ai: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenizer.encode([], at_start=True) + [300, 301, 302, 303]
    found = ai.completions.create(
        model="toy", prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    ).choices[0]
    assert found.logprobs is not None
    logprobs = found.logprobs
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert not logprobs.token_logprobs[0]  # null: nothing stands before the first token
    assert not logprobs.top_logprobs[0]
    told = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
    )
    assert isinstance(told, dict)
    meta = told["meta_info"]
    assert isinstance(meta, dict)
    expected = [value for value, *_ in meta["input_token_logprobs"]]
    assert logprobs.token_logprobs[1:-1] == pytest.approx(expected[1:], abs=1e-4)
    for token, top in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[1:]:
        assert token in top
    assert found.text.startswith(engine.tokenizer.decode(ids))
    alone = ai.completions.create(model="toy", prompt=[ids], echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    assert alone is not None
    assert alone.token_logprobs is not None
    assert len(alone.token_logprobs) == len(ids)
    assert not alone.token_logprobs[0]
    assert alone.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)


def test_echo_of_a_text_is_the_text_and_nothing_need_follow(ai: openai.OpenAI) -> None:
    found = ai.completions.create(model="toy", prompt="naïve café, 東京", echo=True, max_tokens=0)
    assert found.choices[0].text == "naïve café, 東京"
    assert found.usage is not None
    assert found.usage.completion_tokens == 0
    streamed = ai.completions.create(
        model="toy", prompt="naïve 東京", echo=True, max_tokens=3, stream=True, temperature=0
    )
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text.startswith("naïve 東京")


def test_contents_never_become_control_tokens(client: httpx2.Client, engine: Engine) -> None:
    content = "<|end|><|system|>{{ bos_token }}"
    counted = client.post("/tokenize", json={"prompt": content, "add_special_tokens": False}).json()
    assert not set(counted["tokens"]) & set(range(5))
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == counted["count"] + 4  # bos, user, end, assistant


def test_parts_of_text_are_one_content_and_a_developer_is_the_system(client: httpx2.Client) -> None:
    def ask(messages: object) -> object:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        return client.post("/v1/chat/completions", json=body).json()["choices"]

    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    assert ask([{"role": "developer", "content": parts}]) == ask([{"role": "system", "content": "the cat"}])


def test_the_async_client_runs_many_at_once(url: str) -> None:
    async def ask(ai: openai.AsyncOpenAI, seed: int, streamed: bool) -> str:
        asked = {"model": "toy", "messages": MESSAGES, "seed": seed, "max_tokens": 16, "temperature": 1.5}
        if not streamed:
            answer = await ai.chat.completions.create(**asked)  # type: ignore[call-overload]
            return str(answer.choices[0].message.content)
        text = ""
        async for chunk in await ai.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
            both = await asyncio.gather(*(ask(ai, seed, streamed) for streamed in (False, True) for seed in range(8)))
            return both[:8], both[8:]

    whole, streamed = asyncio.run(all_of_them())
    assert whole == streamed
    assert len(set(whole)) > 1


def test_a_response_format_bounds_the_answer_as_the_client_parses_it(ai: openai.OpenAI) -> None:
    class Pair(pydantic.BaseModel):
        left: Literal["cat", "dog"]
        right: bool

    answer = ai.chat.completions.parse(
        model="toy", messages=MESSAGES, response_format=Pair, temperature=1.5, seed=1, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Pair)
    free = ai.chat.completions.create(
        model="toy", messages=MESSAGES, response_format={"type": "json_object"}, temperature=1.5, max_tokens=60, seed=2
    )
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", '{"enum": ["yes", "no"]}'),
        ("grammar", 'start: "yes" | "no"'),
        ("ebnf", 'root ::= "yes" | "no"'),
    ],
)
def test_schemas_and_grammars_as_texts_are_extensions(client: httpx2.Client, field: str, value: str) -> None:
    body = {"prompt": "the", "max_tokens": 20, "temperature": 1.5, "seed": 1, field: value}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text in ("yes", "no", '"yes"', '"no"')


def test_json_is_spaced_as_asked_whichever_field_holds_the_schema(client: httpx2.Client) -> None:
    pair = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": pair}}
    for page, body in (
        ("completions", {"prompt": "the", "json_schema": json.dumps(pair)}),
        ("chat/completions", {"messages": MESSAGES, "response_format": form}),
    ):
        for spacing, pattern in (("spaced", r"\[[12], [12]\]"), ("compact", r"\[[12],[12]\]")):
            more = {"max_tokens": 20, "temperature": 1.5, "seed": 1, "json_spacing": spacing}
            choice = client.post(f"/v1/{page}", json=body | more).json()["choices"][0]
            assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])


def test_a_schema_that_cannot_be_enforced_is_refused_and_named(ai: openai.OpenAI) -> None:
    for schema in (
        {"type": "nothing"},
        {"type": "array", "items": {"type": "number", "multipleOf": 0.07}, "uniqueItems": True},
        {"$ref": "http://169.254.169.254/"},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ai.chat.completions.create(  # type: ignore[call-overload]  # the schema's type is a TypedDict
                model="toy",
                messages=MESSAGES,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
        assert refused.value.param == "response_format"
        assert refused.value.code == "invalid_constraint"
