"""Names that other frameworks, and habit, give to what is here: told where one of them is not found. Plain data.

A table leads from a name to ours, or to a few words on what to write.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

Names: TypeAlias = Mapping[str, str]


def _all(meant: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), meant)


_SAMPLING: Names = {
    **_all("max_tokens", "max_length max_completion_tokens max_output_tokens max_gen_len num_tokens length"),
    **_all("max_tokens", "max_len n_predict num_predict"),
    **_all("min_tokens", "min_new_tokens min_length"),
    **_all("stop", "stop_sequences stop_sequence stop_strings stop_str stop_words stops until"),
    **_all("temperature", "temp"),
    **_all("n", "num_return_sequences num_samples num_completions num_choices"),
    **_all("seed", "random_seed sampling_seed"),
    **_all("repetition_penalty", "repeat_penalty"),
    **_all("top_logprobs_num", "top_logprobs"),
    **_all("write return_logprob=True, with top_logprobs_num= for those beside it", "logprobs logprob"),
    **_all("leave it out: temperature=0 takes the likeliest token, and above 0 one is drawn", "do_sample greedy"),
}

GEN: Names = MappingProxyType(
    {
        **_SAMPLING,
        **_all("name", "var variable variable_name key output_key save_as"),
        **_all("dtype", "response_model output_type return_type type cls model_class"),
        "response_format": "a type is given as dtype=, a schema as json_schema=",
        **_all("json_schema", "schema json guided_json"),
        **_all("regex", "pattern guided_regex"),
        **_all("grammar", "ebnf lark cfg guided_grammar gbnf"),
        **_all("choices", "options guided_choice enum"),
        **_all("tools", "functions"),
        **_all("tool_choice", "function_call"),
        **_all("reasoning", "thinking enable_thinking reasoning_effort"),
        "max_retries": "leave it out: a dtype cannot fail on its form",
        **_all("text stands before it: s += 'text' + gen('x')", "prompt prompts text input"),
        "messages": "turns stand before it: s += user('text') + assistant(gen('x'))",
        **_all("it is a run's: f.run(..., backend=nw.Engine('FOLDER'))", "model llm engine"),
        "backend": "it is a run's: f.run(..., backend=...)",
        "stream": "it is a run's: f.run(..., stream=True)",
        "chat_template": "it is a run's: f.run(..., chat_template=...)",
    }
)

SELECT: Names = MappingProxyType(
    {
        **_all("name", "var variable variable_name key output_key save_as"),
        **_all("choices", "options items candidates values labels guided_choice enum"),
        **_all("choices_method", "method choice_method scoring"),
        **_all(
            "a select compares whole choices; leave it out",
            "max_tokens max_new_tokens min_tokens n stop stop_regex top_p top_k min_p seed regex dtype json_schema",
        ),
    }
)

TURN: Names = MappingProxyType(
    {
        **_all("content", "text message msg prompt value"),
        "name": "a turn has none; a variable's stands in its gen: assistant(gen('x'))",
        "tools": "they stand in the first turn: system(..., tools=[...])",
        "messages": "a call is one turn, and turns add up with +",
        **_all("it is an option of the gen inside: assistant(gen('x', ...))", "max_tokens temperature stop dtype"),
    }
)

FORK: Names = MappingProxyType({**_all("count", "n size num number num_forks n_forks times k")})

OF_FUNCTION: Mapping[str, Names] = MappingProxyType(
    {"gen": GEN, "select": SELECT, "system": TURN, "user": TURN, "assistant": TURN, "fork": FORK}
)

RUN: Names = MappingProxyType(
    {
        **_SAMPLING,
        **_all("give it as backend=nw.Engine('FOLDER')", "model model_path model_name"),
        **_all("backend", "llm lm engine client endpoint runtime host"),
        **_all("chat_template", "template"),
        **_all("stream", "streaming"),
        **_all("timeout", "timeout_s max_time request_timeout"),
        **_all(
            "it is an option of a gen: s += gen('x', ...)",
            "dtype regex choices json_schema grammar tools tool_choice reasoning response_model response_format",
        ),
    }
)

PROGRAM: Names = MappingProxyType(
    {
        **_all("run_batch", "batch map run_many run_all batch_run starmap"),
        **_all("arun_batch", "abatch amap"),
        **_all("run", "invoke generate call execute predict apply forward complete"),
        **_all("arun", "ainvoke acall agenerate run_async async_run apredict"),
        **_all("stream", "astream run_stream stream_run iter"),
        **_all("bind", "partial with_options configure with_config with_args"),
    }
)

STATE: Names = MappingProxyType(
    {
        **_all("write s += nw.gen(...)", "generate complete predict ask"),
        **_all("write s += nw.select(...)", "choose"),
        **_all("write s += ...", "append add extend write push"),
        **_all("write s['x'] = value", "set assign set_variable"),
        **_all("get_var", "var variable get_variable"),
        **_all("s['x'] is one variable, s.tree().trunk.variables are all", "variables vars keys values items to_dict"),
        **_all("text_iter", "stream iter_text stream_text text_stream"),
        **_all("text_async_iter", "astream async_text_iter"),
        **_all("get_meta_info", "meta_info metadata meta log_prob log_probs logprob logprobs get_logprobs"),
        **_all("ret_value", "result return_value returned"),
        **_all("token_ids", "tokens ids"),
        **_all("forks = s.fork(n) are joined: forks.join()", "join"),
        **_all("cancel", "stop abort"),
        **{name: f"write s += nw.{name}()" for name in "system_begin user_begin assistant_begin".split()},
        **{name: f"write s += nw.{name}()" for name in "system_end user_end assistant_end".split()},
    }
)

FORKS: Names = MappingProxyType(
    {
        **_all("write forks += nw.gen(...)", "gen gen_int gen_float gen_bool gen_string generate"),
        **_all("write forks += nw.select(...)", "select"),
        **_all("write forks += ..., a list for one item to each", "append add extend write"),
        **_all("join", "gather merge collect wait_all"),
        **_all("forks[0] is the first, and a loop goes over all", "states children branches forks"),
    }
)

_ENGINE = "nw.Engine('FOLDER') runs a model of yours, and without any the bundled one runs"
_OPENAI = "nw.OpenAI takes the address of any service that speaks OpenAI's API"

MODULE: Names = MappingProxyType(
    {
        **_all("write nw.gen('x', regex=...)", "regex Regex"),
        **_all(
            "write nw.gen('x', json_schema=...), or dtype= with a type", "json json_schema gen_json Json JsonSchema"
        ),
        **_all("write nw.gen('x', grammar=...)", "grammar cfg CFG lark ebnf"),
        **_all("write nw.gen('x', tools=[...])", "tool tools"),
        **_all("write nw.gen('x', dtype=...)", "dtype type from_openai patch"),
        **_all(_ENGINE, "LLM AsyncLLM Llama LlamaCpp Transformers from_transformers models model load load_model"),
        **_all("options stand in nw.gen('x', temperature=0), or in f.run(temperature=0)", "SamplingParams sampling"),
        **_all("gen", "generate complete completion Gen Generate Generator"),
        **_all("select", "choice choices Select Choice"),
        **_all("function", "program Program prompt guidance template func fn"),
        **_all("set_default_backend", "set_backend default_backend set_model configure"),
        **_all("a state forks: s.fork(n)", "fork"),
        **_all("a program runs: f.run(...), f.run_batch([...])", "run run_batch batch invoke"),
        **_all(_OPENAI, "Anthropic VertexAI LiteLLM Crusoe Gemini Ollama AzureOpenAI"),
        **_all("no model that runs here sees films; give it a text that describes one", "video"),
    }
)


def hint(name: str, foreign: Names, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What may have been meant by a name that is not known, to be set behind the fault; empty where nobody knows."""
    meant = foreign.get(name)
    if meant is not None:
        return f"; it is called {meant!r} here" if meant.isidentifier() else f"; {meant}"
    close = difflib.get_close_matches(name, known, 1, cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def public(kind: type) -> list[str]:
    """The names of a class that one may write."""
    return [name for name in dir(kind) if not name.startswith("_")]
