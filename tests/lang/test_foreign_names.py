"""Words of other frameworks, and slips of the pen: each is answered with the name that the thing has here."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

import pytest

import niwaki as nw
from niwaki.lang import foreign_names
from niwaki.lang.arguments import RUN_NAMES
from niwaki.lang.foreign_names import OF_FUNCTION, public
from niwaki.lang.program import Program
from niwaki.lang.state import ForkGroup, State
from niwaki.runtime.api import names
from niwaki.runtime.api.names import Names
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.from_dict import KNOWN_NAMES, WIRE_NAMES, options_from_dict

gen, select, system, user, assistant = (
    cast("Any", one) for one in (nw.gen, nw.select, nw.system, nw.user, nw.assistant)
)


@nw.function
def tell(s: State, topic: str) -> None:
    s += f"Of {topic}: " + nw.gen("answer")


def backend() -> nw.ScriptedBackend:
    return nw.ScriptedBackend(lambda prompt: "a b c d e f")


def refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(nw.ProgramError, match=re.escape(message)):
        act()


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("temprature", "did you mean 'temperature'?"),
        ("stop_sequences", "it is called 'stop' here"),
        ("max_completion_tokens", "it is called 'max_tokens' here"),
        ("response_model", "it is called 'dtype' here"),
        ("guided_regex", "it is called 'regex' here"),
        ("options", "it is called 'choices' here"),
        ("backend", "it is a run's: f.run(..., backend=...)"),
        ("prompt", "text stands before it: s += 'text' + gen('x')"),
        ("structured_outputs", "name the constraint itself: regex, choices, json_schema or grammar"),
        ("choice", "it is called 'choices' here"),
        ("bad_words", "a logit_bias of -100 keeps a token out"),
        ("prompt_logprobs", "write return_logprob=True, logprob_start_len=0"),
        ("include_stop_str_in_output", "a stop is never part of the text"),
        ("list_append", "a variable holds one value"),
        ("retries", "leave it out: a dtype cannot fail on its form"),
        ("streaming", "it is a run's: f.run(..., stream=True)"),
        ("callbacks", "no function is called with the tokens"),
        ("eos_token_id", "it is called 'stop_token_ids' here"),
        ("system", "turns stand before it"),
        ("validators", "validators stand in the type"),
        ("images", "no model that runs here reads images or sound"),
        ("lora_path", "no adapters are loaded beside a model"),
        ("no_repeat_ngram_size", "leave it out: temperature"),
        ("qqq", "it takes name, max_tokens, min_tokens"),
    ],
)
@pytest.mark.parametrize("function", [gen, nw.gen_int])
def test_an_option_that_a_gen_has_not_is_told_by_its_name_here(
    function: Callable[..., object], option: str, meant: str
) -> None:
    refused(lambda: function("x", **{option: 3}), f"gen has no option {option!r}; {meant}")


def test_text_in_the_place_of_a_variables_name_is_told_where_it_goes() -> None:
    where = "text stands before it: s += 'text' + gen('name')"
    refused(lambda: gen("x", max_tokens="ten"), "takes the name of a variable and max_tokens, a whole number, got 'x'")
    refused(lambda: gen("Write a poem.", "x"), f"got 'Write a poem.' and 'x'; {where}")
    refused(lambda: gen("Write a poem.", name="x"), f"given its name twice, 'Write a poem.' and name='x'; {where}")
    refused(lambda: cast("Any", nw.gen_int)("x", 5), "gen_int takes name by position, got 2 arguments")


@pytest.mark.parametrize(
    ("act", "meant"),
    [
        (lambda: select("x", options=["a"]), "select has no option 'options'; it is called 'choices' here"),
        (lambda: select("x", ["a"], method="exact"), "'method'; it is called 'choices_method' here"),
        (lambda: select("x", ["a"], choice_methods="exact"), "did you mean 'choices_method'?"),
        (lambda: select("x", ["a"], max_tokens=3), "'max_tokens'; a select compares whole choices"),
        (lambda: select("x", ["a"], qqq=3), "it takes name, choices, temperature, choices_method, timeout, heal"),
        (lambda: select(["a", "b"], name="x"), "choices come behind it: select('name', [...])"),
        (lambda: system("a", name="b"), "system has no option 'name'; a turn has none"),
        (lambda: user(text="b"), "user has no option 'text'; it is called 'content' here"),
        (lambda: assistant("a", temperature=0), "it is an option of the gen inside"),
        (lambda: assistant("a", tools=[len]), "they stand in the first turn: system(..., tools=[...])"),
        (lambda: assistant("a", gen("y")), "assistant takes one content; add them up: assistant('text' + gen('x'))"),
        (lambda: user("a", "b"), "user takes one content; add them up"),
        (lambda: system("a", gen("y")), "system takes one content; add them up"),
    ],
)
def test_a_call_that_fits_no_select_and_no_turn_is_told_what_would(act: Callable[[], object], meant: str) -> None:
    refused(act, meant)


@pytest.mark.parametrize(
    ("act", "meant"),
    [
        (lambda s: s.user("a", name="b"), "user has no option 'name'; a turn has none"),
        (lambda s: s.assistant("a", gen("y")), "assistant takes one content"),
        (lambda s: s.fork(n=3), "fork has no option 'n'; it is called 'count' here"),
    ],
)
def test_so_is_a_call_of_a_states_own(act: Callable[[Any], object], meant: str) -> None:
    refused(lambda: nw.function(lambda s: act(s)).run(backend=backend()), meant)


def test_a_type_error_of_somebody_elses_code_stays_one() -> None:
    class Odd(list[str]):
        def count(self, value: str, /) -> int:
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        nw.select("x", Odd(["a", "a"]))


def test_what_explains_misfits_looks_like_the_function_itself() -> None:
    assert next(iter(inspect.signature(nw.gen).parameters)) == "name"
    assert list(inspect.signature(nw.select).parameters)[:2] == ["name", "choices"]
    assert nw.gen.__module__ == "niwaki.lang.expressions"


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_takes_both_spellings_of_the_number_of_tokens() -> None:
    for options in ({"max_tokens": 3}, {"max_new_tokens": 3}, {"options": {"max_tokens": 3}}):
        assert tell.run("cats", backend=backend(), **options)["answer"] == "a b c"
        (row,) = tell.run_batch([{"topic": "cats"}], backend=backend(), **options)
        assert isinstance(row, State)
        assert row["answer"] == "a b c"
    refused(lambda: tell.run("cats", max_tokens=3, max_new_tokens=4), "are the same option; give one of them")
    refused(lambda: tell.run_batch([], max_tokens=3, max_new_tokens=4), "are the same option; give one of them")


def test_what_is_bound_by_one_spelling_is_overridden_by_the_other() -> None:
    three = "a b c"
    assert tell.bind(max_new_tokens=1).run("cats", backend=backend(), max_tokens=3)["answer"] == three
    assert tell.bind(max_tokens=1).run("cats", backend=backend(), max_new_tokens=3)["answer"] == three
    assert tell.bind(max_tokens=3).run("cats", backend=backend())["answer"] == three


def test_a_parameter_of_that_name_is_the_programs() -> None:
    def own(s: State, max_tokens: str) -> object:
        s += "text"
        return max_tokens

    def whole(s: State, max_new_tokens: str) -> object:
        s += "text"
        return max_new_tokens

    assert nw.function(own).run(max_tokens="mine", backend=backend()).ret_value == "mine"
    assert nw.function(own).run(max_tokens="mine", max_new_tokens=3, backend=backend()).ret_value == "mine"
    refused(lambda: nw.function(whole).run(max_tokens=3), "did you mean 'max_new_tokens'?")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("model", "give it as backend=nw.Engine('FOLDER')"),
        ("engine", "it is called 'backend' here"),
        ("max_length", "it is called 'max_tokens' here"),
        ("dtype", "it is an option of a gen: s += gen('x', ...)"),
        ("backnd", "did you mean 'backend'?"),
    ],
)
def test_an_option_that_a_run_has_not_is_told_by_its_name_here(option: str, meant: str) -> None:
    for act in (tell.run, tell.bind):
        refused(lambda act=act: act(**{option: 1}), f"no option of a run; {meant}")  # type: ignore[misc]
    refused(lambda: tell.run("a", options={option: 1}), f"a run has no option {option!r}; {meant}")
    refused(lambda: cast("Any", tell).run_batch([], **{option: 1}), f"a batch has no option {option!r}; {meant}")


def test_an_option_of_a_batch_is_told_by_its_own_near_name() -> None:
    refused(lambda: tell.run_batch([], num_thread=3), "a batch has no option 'num_thread'; did you mean 'num_threads'?")
    refused(lambda: tell.arun_batch([], concurency=3), "did you mean 'concurrency'?")
    refused(lambda: tell.run_batch([], concurrency=3), "is num_threads of run_batch and concurrency of arun_batch")


# -- attributes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch", "a program has no attribute 'batch'; it is called 'run_batch' here"),
        ("map", "it is called 'run_batch' here"),
        ("invoke", "it is called 'run' here"),
        ("abatch", "it is called 'arun_batch' here"),
        ("run_bach", "did you mean 'run_batch'?"),
    ],
)
def test_what_is_no_attribute_of_a_program_is_told_by_its_name_here(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(meant)):
        getattr(tell, name)
    assert not hasattr(tell, name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("generate", "write s += nw.gen(...)"),
        ("user_begin", "write s += nw.user_begin()"),
        ("assistant_end", "write s += nw.assistant_end()"),
        ("append", "write s += ..."),
        ("set", "write s['x'] = value"),
        ("variables", "s['x'] is one variable, s.tree().trunk.variables are all"),
        ("result", "it is called 'ret_value' here; a variable is s['result']"),
        ("text_itr", "did you mean 'text_iter'?; a variable is s['text_itr']"),
    ],
)
def test_what_is_no_attribute_of_a_state_is_told_by_its_name_here(name: str, meant: str) -> None:
    state = tell.run("cats", backend=backend())
    with pytest.raises(AttributeError, match=re.escape(meant)) as caught:
        getattr(state, name)
    assert ("a variable is s[" in str(caught.value)) == ("a variable is s[" in meant)


def test_all_variables_are_where_a_state_says() -> None:
    assert dict(tell.run("cats", backend=backend()).tree().trunk.variables) == {"answer": "a b c d e f"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gen", "write forks += nw.gen(...)"),
        ("append", "write forks += ..."),
        ("gather", "it is called 'join' here"),
        ("text", "each fork has one: forks[0].text, or for fork in forks: fork.text"),
        ("get_var", "each fork has one: forks[0].get_var"),
        ("joins", "did you mean 'join'?"),
    ],
)
def test_what_is_no_attribute_of_a_group_of_forks_is_told(name: str, meant: str) -> None:
    forks = tell.run("cats", backend=backend()).fork(2)
    with pytest.raises(AttributeError, match=re.escape(f"a group of forks has no attribute {name!r}; {meant}")):
        getattr(forks, name)
    forks.join()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("regex", "write nw.gen('x', regex=...)"),
        ("json", "write nw.gen('x', json_schema=...)"),
        ("LLM", "nw.Engine('FOLDER') runs a model of yours"),
        ("SamplingParams", "options stand in nw.gen('x', temperature=0)"),
        ("generate", "it is called 'gen' here"),
        ("from_openai", "write nw.gen('x', dtype=...), and run on nw.OpenAI(...) for a service"),
        ("from_vllm", "nw.Engine('FOLDER') runs a model of yours"),
        ("StructuredOutputsParams", "write nw.gen('x', regex=...), or choices="),
        ("one_or_more", "write nw.gen('x', regex=...)"),
        ("substring", "write nw.gen('x', regex=...)"),
        ("exactly_n_repeats", "write nw.gen('x', regex=...)"),
        ("multinomial", "write nw.gen('x', temperature=...)"),
        ("token_limit", "write nw.gen('x', max_tokens=...)"),
        ("LlamaGrammar", "write nw.gen('x', grammar=...)"),
        ("AsyncLLMEngine", "nw.Engine('FOLDER') runs a model of yours"),
        ("TokensPrompt", "token ids are given as engine.generate(input_ids=[...])"),
        ("Template", "a prompt is text in a program"),
        ("Predict", "a program is a function"),
        ("Application", "a program is a function"),
        ("embed", "no model that runs here was trained to embed texts"),
        ("Call", "import it from niwaki.lang.tools"),
        ("serving", "import it from niwaki.runtime.server.serve"),
        ("Endpoint", "import it from niwaki.lang.endpoint"),
        ("serve", "niwaki serve is a command"),
        ("Field", "it is Pydantic's: from pydantic import Field"),
        ("set_backend", "it is called 'set_default_backend' here"),
        ("asistant", "did you mean 'assistant'?"),
    ],
)
def test_what_is_no_name_of_niwaki_is_told(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"module 'niwaki' has no attribute {name!r}; {meant}")):
        getattr(nw, name)


@pytest.mark.parametrize(
    "name", ["Call", "serving", "Endpoint", "Program", "ForkGroup", "MetaInfo", "Usage", "Backend", "SamplingOptions"]
)
def test_a_class_for_annotations_is_where_the_message_says(name: str) -> None:
    with pytest.raises(AttributeError, match="import it from niwaki") as caught:
        getattr(nw, name)
    module = str(caught.value).split("import it from ")[1].split(";")[0]
    assert hasattr(importlib.import_module(module), name)


def test_a_role_that_is_held_open_without_a_state_is_told_how() -> None:
    for role in (system, user, assistant):
        with pytest.raises(nw.ProgramError, match=re.escape("with s.assistant(): ...")), role():
            pass


# -- an engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[nw.Engine]:
    with nw.Engine(kv_tokens=1024) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("chat", "a chat is a program of turns: s += nw.user('text')"),
        ("get_tokenizer", "it is called 'tokenizer' here"),
        ("encode", "no model that runs here was trained to embed texts"),
        ("score", "nw.select(...) in a program compares texts"),
        ("run", "a program runs on it: f.run(..., backend=engine)"),
        ("tokenize", "write tokenizer.encode('text') or tokenizer.decode(ids)"),
        ("load_state", "it is called 'load_cache' here"),
        ("set_cache", "leave it out: what prompts share stays in the cache"),
        ("n_ctx", "write get_server_info()['context_length']"),
        ("close", "it is called 'shutdown' here"),
        ("generat", "did you mean 'generate'?"),
    ],
)
def test_what_is_no_attribute_of_an_engine_is_told_by_its_name_here(engine: nw.Engine, name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"an engine has no attribute {name!r}; {meant}")):
        getattr(engine, name)
    assert not hasattr(engine, name)


def test_text_is_added_to_a_state_and_not_to_an_engine(engine: nw.Engine) -> None:
    lm: Any = engine
    refused(lambda: lm + "text", "an engine is no text to add to; a program is")
    refused(lambda: "text" + lm, "an engine is no text to add to; a program is")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prompts", "it is called 'prompt' here"),
        ("prompt_token_ids", "it is called 'input_ids' here"),
        ("messages", "turns stand in a program"),
        ("qqq", "it takes a prompt or input_ids, sampling_params"),
        ("temperature", "is one of the sampling_params, which are a dict: generate(prompt, {'temperature': 1})"),
    ],
)
def test_an_argument_that_generate_has_not_is_told_by_its_name_here(engine: nw.Engine, name: str, meant: str) -> None:
    with pytest.raises(nw.RequestError, match=re.escape(meant)):
        cast("Any", engine).generate(**{name: 1})


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("model_path", "it is called 'model' here"),
        ("gpu_memory_utilization", "it is called 'kv_memory' here"),
        ("max_model_len", "the model's folder says how long a text may be"),
        ("tensor_parallel_size", "an engine runs on one device"),
        ("trust_remote_code", "no code comes out of a checkpoint"),
        ("enforce_eager", "leave it out: there is nothing to choose here"),
        ("enable_lora", "no adapters are loaded beside a model"),
        ("speculative_config", "no second model guesses; draft_tokens="),
        ("swap_space", "host_cache_bytes= is the memory"),
        ("n_threads", "OMP_NUM_THREADS=4"),
        ("max_tokens", "it is one of the sampling_params: engine.generate(prompt, {'max_tokens': 16})"),
        ("kv_token", "did you mean 'kv_tokens'?"),
        ("qqq", "it has model, device, dtype"),
    ],
)
def test_an_option_that_an_engine_has_not_is_told_by_its_name_here(option: str, meant: str) -> None:
    with pytest.raises(nw.ConfigError, match=re.escape(f"Engine has no option {option!r}; ") + ".*" + re.escape(meant)):
        EngineConfig.of(None, {option: 1})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"structured_outputs": {"regex": "a"}}, "'structured_outputs'; name the constraint itself"),
        ({"choice": ["a"]}, "'choice'; it is called 'choices' here"),
        ({"dtype": int}, "'dtype'; write a json_schema, or a program"),
        ({"logprobs": 5}, "'logprobs'; write return_logprob=True"),
        ({"mirostat": 2}, "'mirostat'; leave it out: temperature, top_p, top_k and min_p say how is drawn"),
        ({"logits_processors": []}, "'logits_processors'; no function is called with the logits"),
        ({"allowed_token_ids": [1]}, "'allowed_token_ids'; no function is called with the logits; a constraint"),
        ({"temprature": 5}, "'temprature'; did you mean 'temperature'?"),
        ({"qqq": 5}, "'qqq'; known: max_new_tokens"),
        ({"json_schema": int}, "got the class int; write int.model_json_schema(), or a program"),
    ],
)
def test_a_sampling_parameter_that_is_not_there_is_told(given: dict[str, object], meant: str) -> None:
    with pytest.raises(nw.RequestError, match=re.escape(meant)):
        options_from_dict(given)


# -- the tables --------------------------------------------------------------------------------------------------------

PARAMETERS = {
    function: set(inspect.signature(getattr(nw, function, None) or getattr(State, function)).parameters)
    for function in OF_FUNCTION
}
TABLES: Mapping[str, tuple[Names, set[str]]] = {
    **{function: (names, PARAMETERS[function]) for function, names in OF_FUNCTION.items()},
    "run": (foreign_names.RUN, {*RUN_NAMES, "max_tokens"}),
    "program": (foreign_names.PROGRAM, set(public(Program))),
    "state": (foreign_names.STATE, set(public(State))),
    "forks": (foreign_names.FORKS, set(public(ForkGroup))),
    "niwaki": (foreign_names.MODULE, set(nw.__all__)),
    "engine": (names.ENGINE, {field.name for field in fields(EngineConfig)}),
    "attributes": (names.ATTRIBUTES, {*public(nw.Engine), "tokenizer"}),
    "generate": (names.GENERATE, set(inspect.signature(nw.Engine.generate).parameters)),
    "parameters": (names.PARAMETERS, {*KNOWN_NAMES, *WIRE_NAMES}),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_names_what_is_there_and_no_name_that_is_taken(table: str) -> None:
    foreign, known = TABLES[table]
    assert {meant for meant in foreign.values() if meant.isidentifier()} <= known
    assert not set(foreign) & known - {"tools"}  # a system's turn takes them, an assistant's does not
