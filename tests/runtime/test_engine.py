"""The engine end to end on random weights: whatever is shared, split, set back or batched, the tokens are the same."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, assert_type, cast

import pytest
import torch

from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    Choices,
    ConfigError,
    ConstraintError,
    EngineStopped,
    Generation,
    ModelError,
    ProgramError,
    Regex,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Segment,
)
from niwaki.runtime.engine import Engine
from niwaki.runtime.requests.results import Result
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held
from tests.toy import VOCAB_SIZE, make_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv_tokens=4096) as made:
        yield made


@pytest.fixture(autouse=True)
def pages_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        check_idle(request.getfixturevalue("engine"))


def check_idle(engine: Engine) -> None:
    engine.backend.check()
    stats = engine.stats()
    assert stats["pages_held"] == stats["requests_running"] == stats["requests_waiting"] == 0


def prompts(count: int, seed: int, longest: int = 90, shared: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    head = [0] + [draw.randrange(5, VOCAB_SIZE) for _ in range(shared)]
    return [head + [draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def reference(folder: Path, ids: list[int], count: int) -> list[int]:
    """Greedy tokens by transformers, from the same folder."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(ids) :]


def output_ids(result: object) -> list[int]:
    assert isinstance(result, dict)
    return list(result["output_ids"])


def meta_of(result: object) -> dict[str, Any]:
    assert isinstance(result, dict)
    meta = result["meta_info"]
    assert isinstance(meta, dict)
    return meta


def all_ids(results: object) -> list[list[int]]:
    assert isinstance(results, list)
    return [output_ids(result) for result in results]


def test_greedy_tokens_are_those_of_transformers(engine: Engine, folder: Path) -> None:
    for ids in prompts(4, seed=1):
        assert output_ids(engine.generate(input_ids=ids, sampling_params=GREEDY)) == reference(folder, ids, 12)


def test_an_engine_shortens_the_turns_of_threads_and_never_lengthens_them(folder: Path) -> None:
    before = sys.getswitchinterval()
    try:
        for turns, wanted in ((0.005, 0.0005), (0.0001, 0.0001)):
            sys.setswitchinterval(turns)
            with Engine(folder):
                assert sys.getswitchinterval() == pytest.approx(wanted, abs=2e-6)  # kept in whole microseconds
    finally:
        sys.setswitchinterval(before)


def test_a_batch_gives_each_prompt_what_it_gets_alone(folder: Path) -> None:
    batch = prompts(24, seed=2, shared=40)
    with Engine(folder, kv_tokens=4096, enable_prefix_cache=False) as cold:
        alone = [output_ids(cold.generate(input_ids=ids, sampling_params=GREEDY)) for ids in batch]
    with Engine(folder, kv_tokens=4096) as warm:
        assert all_ids(warm.generate(input_ids=batch, sampling_params=GREEDY)) == alone
        assert all_ids(warm.generate(input_ids=batch, sampling_params=GREEDY)) == alone  # now from the cache
        stats = warm.stats()
        # Of the second round only the last token of each prompt had to be computed again.
        assert stats["cached_tokens"] >= sum(len(ids) - 1 for ids in batch)
        check_idle(warm)


@pytest.mark.parametrize("kv_tokens", [128, 192, 320])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_small_pool_sets_requests_back_and_loses_nothing(folder: Path, kv_tokens: int, page_size: int) -> None:
    batch = prompts(16, seed=3, longest=60, shared=10)
    options = {**GREEDY, "max_new_tokens": 30}
    with Engine(folder, kv_tokens=8192, enable_prefix_cache=False) as ample:
        expected = [output_ids(ample.generate(input_ids=ids, sampling_params=options)) for ids in batch]
    with Engine(folder, kv_tokens=kv_tokens, page_size=page_size, chunked_prefill_size=32) as tight:
        assert all_ids(tight.generate(input_ids=batch, sampling_params=options)) == expected
        check_idle(tight)


def test_long_prompts_in_chunks_equal_whole_ones(folder: Path) -> None:
    ids = prompts(1, seed=4, longest=1)[0] + prompts(1, seed=5, shared=300)[0]
    with Engine(folder, kv_tokens=4096, chunked_prefill_size=16) as small, Engine(folder, kv_tokens=4096) as whole:
        expected = output_ids(whole.generate(input_ids=ids, sampling_params=GREEDY))
        assert output_ids(small.generate(input_ids=ids, sampling_params=GREEDY)) == expected


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(engine: Engine) -> None:
    options = {"temperature": 1.0, "max_new_tokens": 10, "seed": 11, "ignore_eos": True}
    ids, *others = prompts(9, seed=6)
    alone = output_ids(engine.generate(input_ids=ids, sampling_params=options))
    mates: list[dict[str, object]] = [{**options, "seed": n, "top_k": 5 + n} for n in range(8)]
    together = engine.generate(input_ids=[ids, *others], sampling_params=[options, *mates])
    assert all_ids(together)[0] == alone
    assert output_ids(engine.generate(input_ids=ids, sampling_params={**options, "seed": 12})) != alone


def test_n_generations_come_from_one_prefill(folder: Path) -> None:
    with Engine(folder, kv_tokens=4096) as engine:
        ids = prompts(1, seed=7, shared=100)[0]
        results = engine.generate(
            input_ids=[ids], sampling_params={"n": 4, "seed": 3, "max_new_tokens": 8, "ignore_eos": True}
        )
        assert len({tuple(output_ids(r)) for r in results}) > 1
        assert engine.stats()["prefilled_tokens"] <= len(ids) + 3  # the last prompt token runs once for each
        check_idle(engine)


def test_stop_strings_end_the_text_before_them_and_end_tokens_do_not_show(engine: Engine) -> None:
    free = engine.generate("the cat", {**GREEDY, "max_new_tokens": 40})
    assert isinstance(free, dict)
    text = str(free["text"])
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = engine.generate("the cat", {**GREEDY, "max_new_tokens": 40, "stop": [stop]})
    assert isinstance(cut, dict)
    assert cut["text"] == text[: text.index(stop)]
    assert meta_of(cut)["finish_reason"] == {"type": "stop", "matched": stop}
    last = output_ids(free)[3]
    stopped = engine.generate("the cat", {**GREEDY, "stop_token_ids": [last]})
    assert isinstance(stopped, dict)
    assert output_ids(stopped)[-1] == last
    assert meta_of(stopped)["finish_reason"]["matched"] == last


def test_constraints_bind_every_draw(engine: Engine) -> None:
    import re

    hot = {"temperature": 1.5, "max_new_tokens": 60, "n": 8}
    dates = engine.generate(["the cat"], {**hot, "regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"})
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", str(r["text"])) and meta_of(r)["complete"] for r in dates)
    picks = engine.generate(["the cat"], {**hot, "choices": ["yes", "yesterday", "no", "東京"]})
    assert {str(r["text"]) for r in picks} <= {"yes", "yesterday", "no", "東京"}


def test_when_the_budget_runs_out_the_shortest_ending_is_taken(engine: Engine) -> None:
    for budget in range(3, 9):
        result = engine.generate(
            "the", {"temperature": 1.0, "seed": budget, "max_new_tokens": budget, "regex": r"\([abc ]*\)"}
        )
        assert isinstance(result, dict)
        assert meta_of(result)["complete"]
        assert str(result["text"]).endswith(")")


def test_logprobs_are_those_of_the_model(engine: Engine, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    ids = prompts(1, seed=8)[0]
    result = engine.generate(
        input_ids=ids, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=3
    )
    assert isinstance(result, dict)
    meta = meta_of(result)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids + output_ids(result)])).logits[0].double().log_softmax(-1)
    told = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert told[0][0] is None
    assert [entry[1] for entry in told] == ids + output_ids(result)
    for position, (value, token_id, _) in enumerate(told[1:]):
        assert value == pytest.approx(float(logits[position, token_id]), abs=1e-4)
    assert all(len(top) == 3 and top[0][0] >= top[1][0] >= top[2][0] for top in meta["output_top_logprobs"])


def test_scores_equal_prompt_logprobs_and_the_prefix_is_computed_once(folder: Path) -> None:
    with Engine(folder, kv_tokens=4096) as engine:
        branch = engine.backend.open()
        scores = engine.backend.score(
            branch, [Segment("the cat sat on the " * 8)], ["mat", "dog", "naïve café"]
        ).result()
        prefilled = engine.stats()["prefilled_tokens"]
        assert prefilled <= len(branch.token_ids) + sum(len(s.logprobs) for s in scores)
        for score in scores:
            ids = [*branch.token_ids, *(entry.token_id for entry in score.logprobs)]
            told = engine.generate(
                input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 1}, return_logprob=True, logprob_start_len=1
            )
            assert isinstance(told, dict)
            expected = [value for value, *_ in meta_of(told)["input_token_logprobs"]][-len(score.logprobs) :]
            assert [entry.logprob for entry in score.logprobs] == pytest.approx(expected, abs=1e-4)
        assert [score.text for score in scores] == ["mat", "dog", "naïve café"]
        engine.backend.close(branch)


def test_forks_share_their_prefix_and_branches_hold_ids_not_text(folder: Path) -> None:
    params = SamplingOptions(max_new_tokens=6, temperature=0.0, ignore_eos=True).resolve()
    with Engine(folder, kv_tokens=4096) as engine:
        backend = engine.backend
        root = backend.open()
        backend.append(root, [Segment("the cat sat on the mat and " * 6)])
        length = len(root.token_ids)
        forks = [backend.fork(root) for _ in range(16)]
        running = [backend.generate(f, [Segment(f" {n}")], params) for n, f in enumerate(forks)]
        for generation, fork in zip(running, forks, strict=True):
            (output,) = generation.result(timeout=60)
            assert fork.token_ids[-6:] == list(output.token_ids)
        assert engine.stats()["prefilled_tokens"] <= length + 16 * 8
        for branch in (root, *forks):
            backend.close(branch)
            backend.close(branch)
        check_idle(engine)


def test_streamed_deltas_add_up_also_when_read_late(engine: Engine) -> None:
    params = SamplingOptions(max_new_tokens=30, temperature=1.3, seed=5, ignore_eos=True, stop=["zz"]).resolve()
    branch = engine.backend.open()
    generation = engine.backend.generate(branch, [Segment("the cat")], params)
    (output,) = generation.result(timeout=60)
    deltas = list(generation.deltas())
    assert "".join(d.text for d in deltas) == output.text
    assert [i for d in deltas for i in d.token_ids] == list(output.token_ids)
    engine.backend.close(branch)


def test_streaming_and_async_calls_say_the_same_as_plain_ones(engine: Engine) -> None:
    plain = engine.generate("the dog", GREEDY)
    assert isinstance(plain, dict)
    streamed = engine.generate("the dog", GREEDY, stream=True)
    assert isinstance(streamed, Iterator)
    assert [*streamed][-1]["text"] == plain["text"]

    async def both() -> tuple[object, object]:
        whole = await engine.async_generate("the dog", GREEDY)
        stream = await engine.async_generate("the dog", GREEDY, stream=True)
        assert not isinstance(stream, dict | list)
        return whole, [result async for result in stream][-1]

    whole, last = asyncio.run(both())
    for said in (whole, last):
        assert isinstance(said, dict)
        assert (said["text"], said["output_ids"]) == (plain["text"], plain["output_ids"])
        assert said["meta_info"].keys() == plain["meta_info"].keys()


def test_async_calls_take_lists_and_tell_log_probabilities_as_plain_ones_do(engine: Engine) -> None:
    prompts = ["the cat sat", "the dog"]
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    plain = engine.generate(prompts, GREEDY, **options)  # type: ignore[call-overload]  # by their names
    told = asyncio.run(engine.async_generate(prompts, GREEDY, **options))  # type: ignore[call-overload]  # the same
    assert isinstance(plain, list)
    assert isinstance(told, list)
    for here, there in zip(plain, told, strict=True):
        assert here["text"] == there["text"]
        for key in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
            assert len(here["meta_info"][key]) == len(there["meta_info"][key]) > 0


def test_a_type_checker_knows_one_prompt_from_a_list_of_them(engine: Engine) -> None:
    """`mypy tests` holds the assert_types."""
    ids = [1, 2, 3]
    one = assert_type(engine.generate("the cat", GREEDY), Result)
    assert assert_type(engine.generate(["the cat"], GREEDY), list[Result])[0]["text"] == one["text"]
    assert assert_type(engine.generate(("the cat",), GREEDY), list[Result])[0]["text"] == one["text"]
    same = assert_type(engine.generate(input_ids=ids, sampling_params=GREEDY), Result)
    several = assert_type(engine.generate(input_ids=[ids], sampling_params=GREEDY), list[Result])
    assert several[0]["text"] == same["text"]

    async def awaited() -> None:
        again = assert_type(await engine.async_generate("the cat", GREEDY), Result)
        listed = assert_type(await engine.async_generate(["the cat"], GREEDY), list[Result])
        assert again["text"] == listed[0]["text"] == one["text"]

    asyncio.run(awaited())


def test_a_cancelled_request_ends_and_its_neighbours_go_on(engine: Engine) -> None:
    long = SamplingOptions(max_new_tokens=400, temperature=0.0, ignore_eos=True).resolve()
    branches = [engine.backend.open() for _ in range(6)]
    with held(engine):
        running: list[Generation] = [engine.backend.generate(b, [Segment("the cat")], long) for b in branches]
        running[2].cancel()
        engine.backend.close(branches[4])  # closing a branch cancels what runs on it
    with pytest.raises(Cancelled):
        running[2].result(timeout=60)
    with pytest.raises(Cancelled):
        running[4].result(timeout=60)
    assert {len(running[n].result(timeout=60)[0].token_ids) for n in (0, 1, 3, 5)} == {400}
    for branch in branches:
        engine.backend.close(branch)


def test_a_higher_priority_goes_before_those_that_waited_longer(folder: Path) -> None:
    base = SamplingOptions(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    finished: list[str] = []
    with Engine(folder, kv_tokens=1024, max_running_requests=1, eviction_policy="priority") as engine:
        backend = engine.backend
        asked = []
        with held(engine, steps=1):  # else one may have ended before the last has come
            for name, priority in (("first", 0), ("low", -3), ("plain", None), ("urgent", 7)):
                params = SamplingOptions(priority=priority).over(base).resolve()
                branch = backend.open()
                generation = backend.generate(branch, [Segment(f"the cat {name}")], params)
                generation.add_done_callback(partial(finished.append, name))
                asked.append((branch, generation))
        for branch, generation in asked:
            generation.result(timeout=60)
            backend.close(branch)
        check_idle(engine)
    finished.remove("first")  # it may have begun before the others came
    assert finished == ["urgent", "plain", "low"]


def test_namespaces_share_nothing(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=1)
    with Engine(folder, kv_tokens=4096) as engine:
        cached = []
        for namespace in ("a", "b", "a"):
            branch = engine.backend.open(namespace=namespace)
            (output,) = engine.backend.generate(branch, [Segment("the cat sat on the mat")], params).result(timeout=60)
            cached.append(output.cached_tokens > 0)
            engine.backend.close(branch)
        assert cached == [False, False, True]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"prompt": "a", "sampling_params": {"heat": 1}}, RequestError, "unknown sampling parameter 'heat'"),
        (
            {"prompt": "a", "max_tokens": 8, "stop": "."},
            RequestError,
            r"generate\(prompt, {'max_tokens': 8, 'stop': '.'}\)",
        ),
        ({"prompt": "a", "prompts": ["a"]}, RequestError, "no argument 'prompts'; it is called 'prompt' here"),
        ({"prompt": "a", "image_data": ["a.png"]}, RequestError, "no model that runs here reads images or sound"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, RequestError, "temperature must be"),
        ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, RequestError, "temperature must be"),
        ({"prompt": "a", "sampling_params": {"regex": "a", "choices": ["b"]}}, RequestError, "at most one constraint"),
        ({"prompt": "a", "sampling_params": {"regex": "a{3"}}, ConstraintError, "a{3"),
        ({"prompt": "a", "sampling_params": {"choices": []}}, ConstraintError, "choice"),
        ({"prompt": "a", "sampling_params": {"stop_token_ids": [9999]}}, RequestError, "9999"),
        ({"prompt": "a", "input_ids": [1]}, RequestError, "either a prompt or input_ids"),
        ({"input_ids": [1, 10**6]}, RequestError, "from 0 to"),
        ({"input_ids": []}, RequestError, "no token"),
        ({"input_ids": [5] * 600}, CapacityError, "holds 512"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 5000}}, CapacityError, "holds 512"),
    ],
)
def test_bad_requests_are_refused_at_the_door(
    engine: Engine, call: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.generate(**call)  # type: ignore[call-overload]


def test_bad_options_and_folders_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option 'kv_token'"):
        Engine(folder, kv_token=5)
    with pytest.raises(ConfigError, match="page_size"):
        Engine(folder, page_size=0)
    with pytest.raises(ModelError, match="nowhere"):
        Engine(tmp_path / "nowhere")


def test_after_shutdown_callers_are_told(folder: Path) -> None:
    engine = Engine(folder, kv_tokens=1024)
    branch = engine.backend.open()
    engine.backend.after_step = lambda: wait_until(lambda: not engine.backend.is_alive)  # till it is shut down
    running = engine.backend.generate(branch, [Segment("the")], SamplingParams(max_new_tokens=400, ignore_eos=True))
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineStopped):
        running.result(timeout=60)
    with pytest.raises(EngineStopped):
        engine.generate("the", GREEDY)


def test_a_closed_or_foreign_branch_is_refused(engine: Engine) -> None:
    branch = engine.backend.open()
    engine.backend.close(branch)
    with pytest.raises(ProgramError, match="closed"):
        engine.backend.generate(branch, [Segment("a")], SamplingParams(constraint=Regex("a")))


def test_text_goes_on_behind_a_stop_string_as_if_it_had_never_been_there(engine: Engine) -> None:
    params = SamplingOptions(max_new_tokens=40, temperature=0.0, ignore_eos=True).resolve()
    branch = engine.backend.open()
    (free,) = engine.backend.generate(branch, [Segment("the cat")], params).result(timeout=60)
    engine.backend.close(branch)
    for at in range(1, len(free.text) - 1, 3):
        stop = free.text[at : at + 1]
        first = free.text.index(stop)
        branch = engine.backend.open()
        start = engine.tokenizer.encode([Segment("the cat")], at_start=True)
        stopping = SamplingOptions(max_new_tokens=40, temperature=0.0, ignore_eos=True, stop=stop).resolve()
        engine.backend.generate(branch, [Segment("the cat")], stopping).result(timeout=60)
        assert engine.tokenizer.decode(list(branch.token_ids)[len(start) :]) == free.text[:first]
        engine.backend.close(branch)


def test_choices_and_regex_as_plain_data_reach_the_sampler(engine: Engine) -> None:
    branch = engine.backend.open()
    params = SamplingOptions(constraint=Choices(("maybe",)), max_new_tokens=20, temperature=0.0).resolve()
    (output,) = engine.backend.generate(branch, [Segment("the cat ")], params).result(timeout=60)
    assert output.text == "maybe"
    assert output.complete
    engine.backend.close(branch)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (5, None, "token ids are given as input_ids="),
        ([5, 6], None, "token ids are given as input_ids="),
        ({"prompt": "a"}, None, "a prompt must be a string"),
        ("a", 5, "sampling_params must be a mapping or a list of them, got 5"),
        ("a", [5], "sampling_params must be a mapping or a list of them"),
    ],
)
def test_what_is_no_prompt_and_what_are_no_parameters_is_refused(
    engine: Engine, prompt: object, params: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(cast("str", prompt), cast("dict[str, object]", params))


def test_an_engine_shows_its_model(engine: Engine) -> None:
    assert repr(engine) == f"<Engine of {engine.get_server_info()['model']}>"


def test_an_option_of_a_like_name_is_pointed_to() -> None:
    with pytest.raises(ConfigError, match="has no option 'models'; did you mean 'model'"):
        Engine(models="x")


def test_a_models_name_in_the_place_of_its_folder_is_told_how_to_get_one() -> None:
    with pytest.raises(ModelError, match=r"nothing is downloaded: hf download Qwen/Qwen3-0.6B --local-dir"):
        Engine("Qwen/Qwen3-0.6B")
    with pytest.raises(ModelError, match=r"does not exist; give a folder with config.json and model.safetensors$"):
        Engine("/no/such/folder")


def test_a_file_of_another_format_is_told_that_it_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"is a file, not a folder; .*; GGUF is not read, the checkpoint that it was"):
        Engine(tmp_path / "model.gguf")


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_told_by_its_file(tmp_path: Path) -> None:
    make_model(tmp_path / "mixed", vocab_size=VOCAB_SIZE - 100)
    with pytest.raises(ModelError, match=r"mixed/tokenizer.json has 3[0-9]+ tokens, .* config.json is 300;"):
        Engine(tmp_path / "mixed")
