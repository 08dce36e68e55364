"""SGLang's wire: what its frontend sends is answered as it expects."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.api import Segment
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import compiling_held, held

GREEDY = {"temperature": 0, "max_new_tokens": 8}

SKIPS: tuple[dict[str, bool], ...] = ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})


def test_generate_answers_what_the_engine_answers(client: httpx2.Client, engine: Engine) -> None:
    told = client.post("/generate", json={"text": "the cat", "sampling_params": GREEDY, "rid": "mine"}).json()
    expected = engine.generate("the cat", GREEDY)
    assert isinstance(expected, dict)
    assert (told["text"], told["output_ids"]) == (expected["text"], expected["output_ids"])
    assert told["meta_info"]["id"] == "mine"
    assert told["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert told["meta_info"]["completion_tokens"] == len(told["output_ids"])


def test_a_list_of_prompts_or_n_gives_a_list_in_order(client: httpx2.Client) -> None:
    def texts(**body: object) -> list[str]:
        return [one["text"] for one in client.post("/generate", json=body).json()]

    both = texts(text=["the cat", "the dog"], sampling_params=GREEDY)
    assert both == [*texts(text=["the cat"], sampling_params=GREEDY), *texts(text=["the dog"], sampling_params=GREEDY)]
    own = texts(text=["the cat", "the dog"], sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}])
    assert both[0] == own[0]
    assert both[1].startswith(own[1])
    assert len(texts(text="the", sampling_params={"n": 3, "max_new_tokens": 2})) == 3
    assert len(texts(input_ids=[[0, 5], [0, 6, 7]], sampling_params=GREEDY)) == 2


def test_the_text_of_a_stream_grows_to_the_whole(client: httpx2.Client) -> None:
    body = {"text": "the cat", "sampling_params": GREEDY | {"ignore_eos": True}}
    whole = client.post("/generate", json=body).json()
    lines = [line for line in client.post("/generate", json=body | {"stream": True}).text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data:")) for line in lines[:-1]]
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_a_stream_in_pieces_adds_up_to_what_grows_without(engine: Engine) -> None:
    greedy = GREEDY | {"max_new_tokens": 24, "ignore_eos": True}
    body: dict[str, object] = {"text": ["the cat", "the dog"], "sampling_params": [greedy, greedy | {"n": 2}]}
    body |= {"return_logprob": True, "top_logprobs_num": 1, "stream": True}
    config = ServerConfig(port=0, incremental_streaming_output=True)
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=60) as client:
        whole = client.post("/generate", json=body | {"stream": False}).json()
        with held(engine) as release, client.stream("POST", "/generate", json=body) as answer:
            lines = []
            for line in answer.iter_lines():
                release()  # not before a piece was told: all would come as one
                lines.append(line)
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for index, one in enumerate(whole):
        own = [part for part in parts if part["index"] == index]
        assert len(own) > 1
        assert "".join(part["text"] for part in own) == one["text"]
        assert [token for part in own for token in part["output_ids"]] == one["output_ids"]
        assert [part["meta_info"]["completion_tokens"] for part in own] == list(
            itertools.accumulate(len(part["output_ids"]) for part in own)
        )
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert [told for part in own for told in part["meta_info"][name]] == one["meta_info"][name]
        assert own[-1]["meta_info"]["finish_reason"] == one["meta_info"]["finish_reason"]


def test_what_the_frontend_sends_for_a_select_is_understood(client: httpx2.Client, engine: Engine) -> None:
    """Choices are scored by the log-probabilities of prompts that are not continued."""
    ids = engine.tokenizer.encode([Segment("the cat sat")], at_start=True)
    body = {
        "text": ["the cat sat", "the cat sat on"],
        "sampling_params": {
            "max_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": [], "temperature": 0, "top_p": 1.0, "top_k": -1,
            "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": False, "regex": None,
            "json_schema": None, "stop_regex": [], "min_new_tokens": 0, "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
        },
        "return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 2, "top_logprobs_num": 2,
    }  # fmt: skip
    first, second = client.post("/generate", json=body).json()
    assert first["meta_info"]["prompt_tokens"] == len(ids)
    told = first["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in told] == ids[2:]
    assert all(value <= 0 and isinstance(text, str) for value, _, text in told)
    assert all(len(top) == 2 for top in first["meta_info"]["input_top_logprobs"])
    assert second["meta_info"]["cached_tokens"] >= 0
    assert first["text"] == ""


def test_who_generates_nothing_is_told_the_log_probabilities_of_the_prompt(client: httpx2.Client) -> None:
    """So the frontend asks for choices by themselves, in `unconditional_likelihood_normalized`."""
    body: dict[str, object] = {"input_ids": [[5, 6, 7], [9]], "return_logprob": True}
    nothing = {"max_new_tokens": 0}
    told = [one["meta_info"] for one in client.post("/generate", json=body | {"sampling_params": nothing}).json()]
    assert [[token_id for _, token_id, _ in one["input_token_logprobs"]] for one in told] == [[5, 6, 7], [9]]
    assert told[0]["input_token_logprobs"][0][0] is None
    assert all(value < 0 for value, _, _ in told[0]["input_token_logprobs"][1:])
    for more in ({"sampling_params": nothing, "logprob_start_len": -1}, {"sampling_params": GREEDY}):
        assert all(
            "input_token_logprobs" not in one["meta_info"] for one in client.post("/generate", json=body | more).json()
        )


def test_log_probabilities_are_asked_for_prompt_by_prompt(client: httpx2.Client) -> None:
    body = {"text": ["the cat", "the dog"], "sampling_params": GREEDY}
    asked = {"return_logprob": [True, False], "logprob_start_len": [1, -1], "top_logprobs_num": [2, 0]}
    first, second = [one["meta_info"] for one in client.post("/generate", json=body | asked).json()]
    whole = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    alone = client.post("/generate", json=body | {"text": "the cat"} | whole).json()["meta_info"]
    names = [name for name in alone if "logprobs" in name]
    assert len(names) == 4
    assert [first[name] for name in names] == [alone[name] for name in names]
    assert not [name for name in second if "logprobs" in name]
    refused = client.post("/generate", json=body | {"return_logprob": [True]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_logprob")


def test_log_probabilities_grow_with_the_text_of_a_stream(client: httpx2.Client, engine: Engine) -> None:
    greedy = GREEDY | {"max_new_tokens": 24, "ignore_eos": True}
    body: dict[str, object] = {"text": "the cat", "sampling_params": greedy}
    body |= {"return_logprob": True, "top_logprobs_num": 1, "stream": True}
    with held(engine) as release, client.stream("POST", "/generate", json=body) as answer:
        lines = []
        for line in answer.iter_lines():
            release()  # not before a piece was told: several would come as one
            lines.append(line)
    told = [json.loads(line.removeprefix("data: "))["meta_info"] for line in lines if line.startswith("data: {")]
    assert len(told) > 1
    for one in told:
        assert len(one["output_token_logprobs"]) == len(one["output_top_logprobs"]) == one["completion_tokens"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert one[name] == told[-1][name][: one["completion_tokens"]]


def test_a_text_ends_with_the_first_match_of_any_of_its_patterns(client: httpx2.Client) -> None:
    free = GREEDY | {"ignore_eos": True}
    whole = client.post("/generate", json={"text": "the cat", "sampling_params": free}).json()["text"]
    letter = next(one for one in whole[1:] if one.isalpha())
    cut = client.post(
        "/generate", json={"text": "the cat", "sampling_params": free | {"stop_regex": ["Q{9}", letter]}}
    ).json()
    assert cut["text"] == whole[: whole.index(letter) + 1]
    assert cut["meta_info"]["finish_reason"]["type"] == "stop"


def test_texts_of_logprobs_come_only_when_asked(client: httpx2.Client) -> None:
    body = {"text": "the", "sampling_params": GREEDY, "return_logprob": True}
    assert {
        text for _, _, text in client.post("/generate", json=body).json()["meta_info"]["output_token_logprobs"]
    } == {None}


def test_a_regex_holds_on_the_wire(client: httpx2.Client) -> None:
    body = {"text": "the", "sampling_params": {"regex": "(yes|no)", "temperature": 2, "max_new_tokens": 9}}
    assert client.post("/generate", json=body).json()["text"] in ("yes", "no")
    pair = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}'
    body = {"text": "the", "sampling_params": {"json_schema": pair, "json_spacing": "spaced", "max_new_tokens": 20}}
    assert re.fullmatch(r"\[[12], [12]\]", client.post("/generate", json=body).json()["text"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": ["a", "a{3"]}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 3}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"json_spacing": "spaced"}}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"logit_bias": {"400": 1}}}, "sampling_params.logit_bias"),
        ({"text": ["a"], "sampling_params": [{"stop_token_ids": [400]}]}, "sampling_params[0].stop_token_ids"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "text"),
        ({"input_ids": [400]}, "input_ids"),
    ],
)
def test_what_it_cannot_do_is_a_400_that_names_it(client: httpx2.Client, body: object, param: str) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_faults_of_sampling_are_told_by_the_names_of_this_page(client: httpx2.Client) -> None:
    body = {"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 3}}
    told = client.post("/generate", json=body).json()["error"]["message"]
    assert told == "min_new_tokens 5 is above max_new_tokens 3"


def test_special_tokens_are_written_where_they_are_asked_for(client: httpx2.Client, engine: Engine) -> None:
    (mark, token_id), *_ = engine.tokenizer.special_ids.items()
    cat = client.post("/tokenize", json={"prompt": "the cat – 猫", "add_special_tokens": False}).json()["tokens"]
    body = {"tokens": [cat[0], token_id, *cat]}
    text = client.post("/detokenize", json={"tokens": cat[:1]}).json()["text"]
    told = [client.post("/detokenize", json=body | more).json()["text"] for more in SKIPS]
    assert told == [text + "the cat – 猫", text + "the cat – 猫", text + mark + "the cat – 猫"]


def test_tokenize_and_detokenize_are_inverse(client: httpx2.Client) -> None:
    texts = ["naïve café, 東京", "the <|end|> of it"]
    told = client.post("/tokenize", json={"prompt": texts}).json()
    assert told["count"] == [len(ids) for ids in told["tokens"]]
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"text": texts}
    one = client.post("/tokenize", json={"prompt": texts[0]}).json()
    assert one["tokens"] == told["tokens"][0]
    assert client.post("/v1/detokenize", json={"tokens": one["tokens"]}).json() == {"text": texts[0]}


def test_info_pages_say_what_is_served_and_no_path(client: httpx2.Client, toy_folder: Path) -> None:
    for page in ("/get_model_info", "/model_info"):
        info = client.get(page).json()
        assert info["model_path"] == "toy"
        assert info["is_generation"] is True
    for page in ("/get_server_info", "/server_info"):
        info = client.get(page).json()
        assert info["kv_tokens"] == 8192
        assert info["kv_bytes_per_token"] == read_model_folder(toy_folder).config.kv_bytes_per_token()
        assert info["max_running_requests"] == 256
        assert info["usage"]["pages_held"] == 0
        assert "/" not in str(info["model"])


def test_flush_cache_forgets_prefixes(client: httpx2.Client, engine: Engine) -> None:
    client.post("/generate", json={"text": "the cat sat on the mat", "sampling_params": GREEDY})
    assert engine.stats()["pages_tree"] > 0
    assert client.post("/flush_cache").status_code == 200
    assert engine.stats()["pages_tree"] == 0
    assert client.get("/flush_cache").text == "Cache flushed.\n"


def test_meta_info_tells_what_the_cache_gave_and_put_is_post(client: httpx2.Client) -> None:
    body = {"text": "the log sat on the cat and the dog " * 3, "sampling_params": GREEDY}
    first, second = (client.put("/generate", json=body).json() for _ in range(2))
    assert second["text"] == first["text"] == client.post("/generate", json=body).json()["text"]
    meta = second["meta_info"]
    assert 10 < meta["cached_tokens"] < meta["prompt_tokens"]
    assert meta["cached_tokens"] > first["meta_info"]["cached_tokens"]


def test_a_request_that_is_aborted_answers_with_what_there_was(client: httpx2.Client, url: str, engine: Engine) -> None:
    asked = {
        "text": "the cat",
        "rid": "mine",
        "stream": True,
        "sampling_params": {"max_new_tokens": 480, "ignore_eos": True, "temperature": 0},
    }
    with held(engine), client.stream("POST", "/generate", json=asked) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx2.post(f"{url}/abort_request", json={"rid": "another"}).json() == {"success": True}
        assert httpx2.post(f"{url}/abort_request", json={"rid": "mine"}).status_code == 200
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    last = json.loads(rest[-2])
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < last["meta_info"]["completion_tokens"] == len(last["output_ids"]) < 480
    assert client.post("/abort_request", json={}).status_code == 400


def test_each_prompt_of_a_list_may_have_a_name_and_is_aborted_by_it_alone(
    client: httpx2.Client, engine: Engine
) -> None:
    sampling = [{"max_new_tokens": count, "ignore_eos": True, "temperature": 0} for count in (480, 20, 20)]
    sampling[1]["n"] = 2
    asked = {"text": ["the cat", "the dog", "a"], "rid": ["one", "two", "three"], "sampling_params": sampling}
    alone = client.post("/generate", json=asked | {"stream": False}).json()
    with held(engine) as release, client.stream("POST", "/generate", json=asked | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post("/abort_request", json={"rid": "one"}).status_code == 200
        release()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    last = {event["index"]: event for event in events}
    assert [last[index]["meta_info"]["id"] for index in range(4)] == ["one", "two", "two", "three"]
    reasons = [last[index]["meta_info"]["finish_reason"]["type"] for index in range(4)]
    assert reasons == ["abort", "length", "length", "length"]
    assert [last[index]["text"] for index in (1, 2, 3)] == [one["text"] for one in alone[1:]]
    assert 0 < last[0]["meta_info"]["completion_tokens"] < 480
    assert [event["index"] for event in events[events.index(last[0]) + 1 :]].count(0) == 0
    wrong = client.post("/generate", json=asked | {"rid": ["one"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "rid")


def test_all_named_requests_are_aborted_at_once_and_only_the_callers(engine: Engine) -> None:
    config = ServerConfig(port=0, key_digests=digests(["ann-has-a-key", "bob-has-a-key"]))
    asked = {"text": "the cat", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    ann, bob = ({"authorization": f"Bearer {name}-has-a-key"} for name in ("ann", "bob"))

    def reason(answer: httpx2.Response) -> object:
        last = [line for line in answer.read().decode().split("\n") if line][-2]
        return json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"]

    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=60) as client, ExitStack() as streams:
        with held(engine):

            def begun(rid: str, headers: dict[str, str]) -> httpx2.Response:
                """Behind its head, so that it can be aborted."""
                body = asked | {"rid": rid}
                return streams.enter_context(client.stream("POST", "/generate", json=body, headers=headers))

            mine = [begun(rid, ann) for rid in ("one", "two")]
            other = begun("one", bob)
            assert client.post("/abort_request", json={"abort_all": True}, headers=ann).status_code == 200
            assert [reason(answer) for answer in mine] == ["abort", "abort"]
        assert reason(other) == "length"


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.mark.parametrize("streams", [False, True])
def test_what_still_compiles_or_waits_for_that_is_found_by_its_name_and_answered_at_once(
    client: httpx2.Client, url: str, engine: Engine, aside: ThreadPoolExecutor, streams: bool
) -> None:
    def ask(place: int) -> httpx2.Response:
        sampling = {"max_new_tokens": 400, "regex": f"(new|{place}|{streams})+"}
        body = {"text": "the cat", "rid": f"compiles-{place}", "stream": streams, "sampling_params": sampling}
        return httpx2.post(f"{url}/generate", json=body, timeout=60)

    def in_flight() -> float:
        lines = client.get("/metrics").text.split("\n")
        return next(float(line.split()[1]) for line in lines if line.startswith("niwaki_sequences_in_flight "))

    finished = engine.stats()["finished"]
    with compiling_held() as begun:
        answers = [aside.submit(ask, place) for place in range(3)]
        for _ in range(2):  # of the third nothing is known yet but that it came
            assert begun.acquire(timeout=60)
        wait_until(lambda: in_flight() == 3)
        for place in range(3):
            assert client.post("/abort_request", json={"rid": f"compiles-{place}"}).status_code == 200
        told = [answer.result(timeout=60) for answer in answers]
        wait_until(lambda: in_flight() == 0)  # while nothing was compiled yet
    for answer in told:
        lines = [line for line in answer.text.split("\n") if line]
        last = json.loads(lines[-2].removeprefix("data: ")) if streams else answer.json()
        assert (last["text"], last["output_ids"]) == ("", [])
        assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}
    again = {"text": "the cat", "rid": "compiles-0", "sampling_params": GREEDY}
    assert client.post("/generate", json=again).json()["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert engine.stats()["finished"] <= finished + 1, "none of them was written behind that"


def test_one_of_several_is_aborted_before_it_is_compiled_and_the_others_are_answered(
    client: httpx2.Client, url: str, aside: ThreadPoolExecutor
) -> None:
    sampling = {"max_new_tokens": 8, "regex": "(one|of|several)+"}
    body = {"text": ["the cat", "the dog"], "rid": ["first", "second"], "sampling_params": sampling}
    with compiling_held() as begun:
        answer = aside.submit(httpx2.post, f"{url}/generate", json=body, timeout=60)
        assert begun.acquire(timeout=60)
        assert client.post("/abort_request", json={"rid": "second"}).status_code == 200
    first, second = answer.result(timeout=60).json()
    assert first["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert first["text"]
    assert (second["text"], second["meta_info"]["finish_reason"]["type"]) == ("", "abort")
