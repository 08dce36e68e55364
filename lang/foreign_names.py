"""Names that other frameworks, and habit, give to what is here: told where one of them is not found. Plain data.

A table leads from a name to ours, or to a few words on what to write. Those of options are `runtime.api.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from niwaki.runtime.api.names import CONSTRAINTS, SAMPLING, Names, all_of

_SAMPLING: Names = {
    **SAMPLING,
    **all_of(
        "leave it out: a dtype cannot fail on its form; what a validator of yours refuses is asked for again in a loop",
        "max_retries retries retry num_retries reask",
    ),
    **all_of(
        "no function is called with the tokens: state = f.stream(...) and state.text_iter()", "callback callbacks"
    ),
}

GEN: Names = MappingProxyType(
    {
        **_SAMPLING,
        **all_of("name", "var variable variable_name key output_key save_as"),
        **all_of("dtype", "response_model output_type return_type type cls model_class"),
        "response_format": "a type is given as dtype=, a schema as json_schema=",
        **CONSTRAINTS,
        **all_of("grammar", "ebnf"),
        **all_of("choices", "options"),
        **all_of("tools", "functions"),
        **all_of("tool_choice", "function_call"),
        **all_of("reasoning", "thinking enable_thinking reasoning_effort"),
        **all_of("text stands behind it: s += gen('x') + 'text'", "suffix"),
        **all_of("a variable holds one value; append to a list of yours, or join forks", "list_append"),
        **all_of("text stands before it: s += 'text' + gen('x')", "prompt prompts text input"),
        "messages": "turns stand before it: s += user('text') + assistant(gen('x'))",
        **all_of("it is a run's: f.run(..., backend=nw.Engine('FOLDER'))", "model llm engine"),
        "backend": "it is a run's: f.run(..., backend=...)",
        **all_of("it is a run's: f.run(..., stream=True)", "stream streaming"),
        **all_of("stop_token_ids", "eos_token_id eos_token_ids"),
        **all_of("write stop_token_ids=, or stop= with its text", "eos_token"),
        **all_of("turns stand before it: s += system('text') + user('text') + assistant(gen('x'))", "system user"),
        **all_of(
            "validators stand in the type that dtype= is given: a Pydantic model's", "validator validators validate"
        ),
        "chat_template": "it is a run's: f.run(..., chat_template=...)",
    }
)

SELECT: Names = MappingProxyType(
    {
        **all_of("name", "var variable variable_name key output_key save_as"),
        **all_of("choices", "options items candidates values labels guided_choice enum"),
        **all_of("choices_method", "method choice_method scoring"),
        **all_of(
            "a select compares whole choices; leave it out",
            "max_tokens max_new_tokens min_tokens n stop stop_regex top_p top_k min_p seed regex dtype json_schema",
        ),
    }
)

TURN: Names = MappingProxyType(
    {
        **all_of("content", "text message msg prompt value"),
        "name": "a turn has none; a variable's stands in its gen: assistant(gen('x'))",
        "tools": "they stand in the first turn: system(..., tools=[...])",
        "messages": "a call is one turn, and turns add up with +",
        **all_of("it is an option of the gen inside: assistant(gen('x', ...))", "max_tokens temperature stop dtype"),
    }
)

FORK: Names = MappingProxyType({**all_of("count", "n size num number num_forks n_forks times k")})

OF_FUNCTION: Mapping[str, Names] = MappingProxyType(
    {"gen": GEN, "select": SELECT, "system": TURN, "user": TURN, "assistant": TURN, "fork": FORK}
)

RUN: Names = MappingProxyType(
    {
        **_SAMPLING,
        **all_of("give it as backend=nw.Engine('FOLDER')", "model model_path model_name"),
        **all_of("backend", "llm lm engine client endpoint runtime host"),
        **all_of("chat_template", "template"),
        **all_of("stream", "streaming"),
        **all_of("timeout", "timeout_s max_time request_timeout"),
        **all_of(
            "it is an option of run_batch", "num_threads progress_bar checkpoint retry_failed generator_style on_error"
        ),
        **all_of(
            "it is an option of a gen: s += gen('x', ...)",
            "dtype regex choices json_schema grammar tools tool_choice reasoning response_model response_format",
        ),
    }
)

PROGRAM: Names = MappingProxyType(
    {
        **all_of("run_batch", "batch map run_many run_all batch_run starmap"),
        **all_of("arun_batch", "abatch amap"),
        **all_of("run", "invoke generate call execute predict apply forward complete"),
        **all_of("arun", "ainvoke acall agenerate run_async async_run apredict"),
        **all_of("stream", "astream run_stream stream_run iter"),
        **all_of("bind", "partial with_options configure with_config with_args"),
    }
)

STATE: Names = MappingProxyType(
    {
        **all_of("write s += nw.gen(...)", "generate complete predict ask"),
        **all_of("write s += nw.select(...)", "choose"),
        **all_of("write s += ...", "append add extend write push"),
        **all_of("write s['x'] = value", "set assign set_variable"),
        **all_of("get_var", "var variable get_variable"),
        **all_of(
            "s['x'] is one variable, s.tree().trunk.variables are all", "variables vars keys values items to_dict"
        ),
        **all_of("text_iter", "stream iter_text stream_text text_stream"),
        **all_of("text_async_iter", "astream async_text_iter"),
        **all_of("get_meta_info", "meta_info metadata meta log_prob log_probs logprob logprobs get_logprobs"),
        **all_of("ret_value", "result return_value returned"),
        **all_of("token_ids", "tokens ids"),
        **all_of("messages", "history conversation turns"),
        **all_of("forks = s.fork(n) are joined: forks.join()", "join"),
        **all_of("cancel", "stop abort"),
        **{name: f"write s += nw.{name}()" for name in "system_begin user_begin assistant_begin".split()},
        **{name: f"write s += nw.{name}()" for name in "system_end user_end assistant_end".split()},
    }
)

FORKS: Names = MappingProxyType(
    {
        **all_of("write forks += nw.gen(...)", "gen gen_int gen_float gen_bool gen_string generate"),
        **all_of("write forks += nw.select(...)", "select"),
        **all_of("write forks += ..., a list for one item to each", "append add extend write"),
        **all_of("join", "gather merge collect wait_all"),
        **all_of("forks[0] is the first, and a loop goes over all", "states children branches forks"),
    }
)

_ENGINE = "nw.Engine('FOLDER') runs a model of yours, and without any the bundled one runs"
_OPENAI = "nw.OpenAI takes the address of any service that speaks OpenAI's API"

MODULE: Names = MappingProxyType(
    {
        **all_of("write nw.gen('x', regex=...)", "regex Regex"),
        **all_of(
            "write nw.gen('x', json_schema=...), or dtype= with a type", "json json_schema gen_json Json JsonSchema"
        ),
        **all_of("write nw.gen('x', grammar=...)", "grammar cfg CFG lark ebnf LlamaGrammar"),
        **all_of("write nw.gen('x', tools=[...])", "tool tools Tool ReAct"),
        **all_of("import it from niwaki.lang.tools", "Call"),
        **all_of("import it from niwaki.runtime.server.serve", "serving"),
        **all_of("import it from niwaki.lang.endpoint", "Endpoint"),
        **all_of("import it from niwaki.lang.program; @nw.function makes one", "Program"),
        **all_of("import it from niwaki.lang.state", "ForkGroup"),
        **all_of("import it from niwaki.lang.meta", "MetaInfo Usage"),
        **all_of("import it from niwaki.runtime.api", "Backend SamplingOptions"),
        **all_of(
            "niwaki serve is a command; in Python: niwaki.runtime.server.serve.serving(engine)",
            "serve Server launch_server",
        ),
        **all_of("it is Pydantic's: from pydantic import Field", "Field BaseModel"),
        **all_of("write nw.gen('x', dtype=...)", "dtype type types response_model"),
        **all_of(
            "write nw.gen('x', dtype=...), and run on nw.OpenAI(...) for a service",
            "from_openai from_anthropic from_gemini from_provider patch",
        ),
        **all_of(_ENGINE, "LLM AsyncLLM Llama LlamaCpp Transformers from_transformers models model load load_model"),
        **all_of(_ENGINE, "AsyncLLMEngine LLMEngine AsyncEngine"),
        **all_of(_ENGINE, "from_vllm_offline from_vllm from_llamacpp from_mlxlm AutoModelForCausalLM pipeline"),
        **all_of("nw.RuntimeEndpoint(url) is a niwaki server, nw.OpenAI(...) any other", "from_sglang from_tgi Client"),
        **all_of("nw.RuntimeEndpoint(url).session() goes on in one", "Session session"),
        **all_of(
            "an engine's options are its arguments: nw.Engine('FOLDER', kv_tokens=4096)",
            "ServerArgs EngineArgs AsyncEngineArgs",
        ),
        **all_of("options are arguments: nw.Engine(...), f.run(...), nw.gen('x', ...)", "global_config settings"),
        **all_of(
            "options stand in nw.gen('x', temperature=0), in f.run(temperature=0), or in a dict for Engine.generate",
            "SamplingParams BeamSearchParams sampling",
        ),
        **all_of(
            "write nw.gen('x', regex=...), or choices=, json_schema=, grammar=",
            "StructuredOutputsParams GuidedDecodingParams one_or_more zero_or_more optional sequence at_least at_most "
            "char_range substring exactly_n_repeats at_least_n_repeats at_most_n_repeats",
        ),
        **all_of("with s.var_scope('x'): makes a variable of the text inside", "capture block"),
        **all_of("write nw.gen('x', max_tokens=...)", "token_limit"),
        **all_of("write nw.gen('x', temperature=...)", "with_temperature samplers multinomial greedy"),
        **all_of("token ids are given as engine.generate(input_ids=[...])", "TokensPrompt TextPrompt"),
        **all_of("leave it out: what prompts share is computed once", "LlamaCache LlamaRAMCache"),
        **all_of("a prompt is text in a program: s += f'...'", "Template PromptTemplate ChatPromptTemplate"),
        **all_of(
            "a conversation is turns: s += nw.user('text') + nw.assistant(nw.gen('x'))",
            "Chat chat ChatSession Message Conversation role",
        ),
        **all_of(
            "a program is a function, and a gen(dtype=...) in it an output",
            "Application Predict ChainOfThought Signature Module InputField OutputField",
        ),
        **all_of("gen", "generate complete completion Gen Generate Generator"),
        **all_of("select", "choice choices Select Choice"),
        **all_of("function", "program prompt guidance template func fn"),
        **all_of("set_default_backend", "set_backend default_backend set_model configure"),
        **all_of("a state forks: s.fork(n)", "fork"),
        **all_of("a program runs: f.run(...), f.run_batch([...])", "run run_batch batch invoke"),
        **all_of("no model that runs here was trained to embed texts", "embed embeddings Embedding"),
        **all_of(_OPENAI, "Anthropic VertexAI LiteLLM Crusoe Gemini Ollama AzureOpenAI"),
        **all_of("no model that runs here sees films; give it a text that describes one", "video"),
    }
)


def public(kind: type) -> list[str]:
    """The names of a class that one may write."""
    return [name for name in dir(kind) if not name.startswith("_")]
