"""Names that other frameworks, and habit, give to options of ours, and what is told where one of them is not found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

Names: TypeAlias = Mapping[str, str]  # to our name, or to a few words on what to write


def all_of(meant: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), meant)


def hint(name: str, foreign: Names, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What may have been meant by a name that is not known, to be set behind the fault; empty where nobody knows."""
    meant = foreign.get(name)
    if meant is not None:
        return f"; it is called {meant!r} here" if meant.isidentifier() else f"; {meant}"
    close = difflib.get_close_matches(str(name), known, 1, cutoff)  # the key of a dict may be anything
    return f"; did you mean {close[0]!r}?" if close else ""


_PICTURES: Final[Names] = all_of(
    "no model that runs here reads images or sound; give it a text that describes them",
    "image images image_data image_url video video_data audio audio_data multi_modal_data attachments",
)

SAMPLING: Final[Names] = MappingProxyType(
    {
        **all_of("max_tokens", "max_length max_completion_tokens max_output_tokens max_gen_len num_tokens length"),
        **all_of("max_tokens", "max_len n_predict num_predict"),
        **all_of("min_tokens", "min_new_tokens min_length"),
        **all_of("stop", "stop_sequences stop_sequence stop_strings stop_str stop_words stops until"),
        **all_of("temperature", "temp"),
        **all_of("n", "num_return_sequences num_samples num_completions num_choices"),
        **all_of("seed", "random_seed sampling_seed"),
        **all_of("repetition_penalty", "repeat_penalty"),
        **all_of("top_logprobs_num", "top_logprobs"),
        **all_of("write return_logprob=True, with top_logprobs_num= for those beside it", "logprobs logprob n_probs"),
        **all_of("write return_logprob=True, logprob_start_len=0", "prompt_logprobs echo"),
        **all_of("leave it out: temperature=0 takes the likeliest token, and above 0 one is drawn", "do_sample greedy"),
        **all_of("n draws several, and their log-probabilities (return_logprob=True) say which is best", "best_of"),
        **all_of(
            "n draws several, and forks branch; no beams are kept",
            "use_beam_search num_beams beam_width length_penalty early_stopping",
        ),
        **all_of(
            "leave it out: temperature, top_p, top_k and min_p say how is drawn, the penalties keep from repeating",
            "mirostat mirostat_mode mirostat_tau mirostat_eta tfs_z typical_p dynatemp_range dynatemp_exponent "
            "dry_multiplier dry_base xtc_probability xtc_threshold top_a samplers penalize_nl repeat_last_n "
            "no_repeat_ngram_size",
        ),
        **_PICTURES,
        **all_of(
            "no adapters are loaded beside a model; merge them into its weights",
            "lora lora_path lora_request adapter adapters",
        ),
        **all_of(
            "no function is called with the logits; a constraint or a logit_bias says what may follow",
            "logits_processor logits_processors custom_logit_processor allowed_token_ids",
        ),
        **all_of("a logit_bias of -100 keeps a token out, a regex such as '(?!.*word).*' a word", "bad_words"),
        **all_of("leave it out: no special tokens are in a text", "skip_special_tokens spaces_between_special_tokens"),
        **all_of(
            "a stop is never part of the text; stop_regex ends it with what it matched",
            "include_stop_str_in_output include_stop save_stop_text no_stop_trim",
        ),
        **all_of("leave it out: what prompts share is computed once", "cache_prompt use_cache"),
        **all_of("no prompt is cut; one that is too long is an error", "truncate_prompt_tokens truncation"),
        **all_of(
            "name the constraint itself: regex, choices, json_schema or grammar",
            "structured_outputs guided_decoding guided_decoding_backend",
        ),
    }
)

CONSTRAINTS: Final[Names] = MappingProxyType(
    {
        **all_of("json_schema", "schema json guided_json"),
        **all_of("regex", "pattern guided_regex"),
        **all_of("grammar", "lark cfg guided_grammar gbnf"),
        **all_of("choices", "choice guided_choice enum"),
    }
)

# Of a dict of sampling parameters, which has no variables and no types.
PARAMETERS: Final[Names] = MappingProxyType(
    {
        **{name: meant for name, meant in SAMPLING.items() if name not in ("min_new_tokens", "sampling_seed")},
        **CONSTRAINTS,
        **all_of(
            "write a json_schema, or a program, whose gen(dtype=...) gives a value of the type",
            "dtype response_model response_format output_type type",
        ),
        "suffix": "a text is gone on with at its end alone; what stands behind is yours to append",
        "detokenize": "leave it out: output_ids stand beside the text",
    }
)

# Of `Engine.generate` itself.
GENERATE: Final[Names] = MappingProxyType(
    {
        **all_of("prompt", "prompts text texts inputs input"),
        **all_of("input_ids", "prompt_token_ids token_ids prompt_ids prompt_tokens"),
        **all_of("sampling_params", "params sampling generation_config"),
        **all_of("turns stand in a program: s += nw.user('text') + nw.assistant(nw.gen('x'))", "messages"),
        **all_of("no adapters are loaded beside a model", "lora_request lora_path"),
        **_PICTURES,
        **all_of("f.run_batch(rows, progress_bar=True) of a program shows a bar", "use_tqdm progress_bar"),
    }
)

# Of an engine's attributes.
ATTRIBUTES: Final[Names] = MappingProxyType(
    {
        **all_of("generate", "complete completion create_completion predict"),
        **all_of("async_generate", "agenerate generate_async acomplete"),
        **all_of("write generate(prompt, ..., stream=True)", "stream stream_generate generate_stream"),
        **all_of(
            "a chat is a program of turns: s += nw.user('text') + nw.assistant(nw.gen('x'))",
            "chat create_chat_completion apply_chat_template",
        ),
        **all_of("tokenizer", "get_tokenizer"),
        **all_of("write tokenizer.encode('text') or tokenizer.decode(ids)", "tokenize detokenize"),
        **all_of("no model that runs here was trained to embed texts", "embed embeddings create_embedding encode"),
        **all_of(
            "nw.select(...) in a program compares texts; one is scored by generate(prompt, {'max_tokens': 0}, "
            "return_logprob=True, logprob_start_len=0)",
            "score loglikelihood logprobs perplexity classify",
        ),
        **all_of(
            "a program runs on it: f.run(..., backend=engine), f.run_batch(rows, backend=engine)", "run run_batch"
        ),
        **all_of("shutdown", "close stop terminate quit release"),
        **all_of("flush_cache", "reset reset_prefix_cache clear_cache"),
        **all_of("stats", "metrics get_metrics usage"),
        **all_of("save_cache", "save_state"),
        **all_of("load_cache", "load_state"),
        **all_of("leave it out: what prompts share stays in the cache", "set_cache"),
        **all_of("n draws several, and forks branch; no beams are kept", "beam_search"),
        **all_of("write get_server_info()['context_length']", "n_ctx context_length max_model_len"),
        **all_of("close the iterator of a stream, which ends its request", "abort abort_request"),
        **all_of("write nw.Engine('FOLDER')", "from_pretrained"),
    }
)

ENGINE: Final[Names] = MappingProxyType(
    {
        **all_of("model", "model_path model_name model_id checkpoint path"),
        **all_of("kv_memory", "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes"),
        **all_of("kv_tokens", "max_total_tokens cache_size"),
        **all_of("write kv_tokens=, the tokens of all pages", "num_gpu_blocks_override num_gpu_blocks"),
        **all_of("kv_dtype", "kv_cache_dtype cache_dtype type_k type_v"),
        **all_of("page_size", "block_size"),
        **all_of("max_running_requests", "max_num_seqs max_batch_size n_parallel"),
        **all_of("chunked_prefill_size", "max_num_batched_tokens n_batch max_prefill_tokens"),
        **all_of("schedule_policy", "scheduling_policy"),
        **all_of("eviction_policy", "radix_eviction_policy"),
        **all_of("enable_prefix_cache", "enable_prefix_caching"),
        **all_of("write enable_prefix_cache=False", "disable_radix_cache"),
        **all_of("deterministic", "enable_deterministic_inference batch_invariant"),
        **all_of("seed", "random_seed"),
        **all_of("dtype", "torch_dtype precision"),
        **all_of("device", "device_map"),
        **all_of("weights", "load_in_8bit load_in_4bit"),
        **all_of(
            "a checkpoint says how it is quantized; weights= keeps another one in few bits", "quantization load_format"
        ),
        **all_of(
            "the model's folder says how long a text may be; kv_tokens= is what the cache holds",
            "max_model_len context_length n_ctx max_seq_len max_seq_length",
        ),
        **all_of(
            "leave it out: there is nothing to choose here",
            "attention_backend grammar_backend sampling_backend enforce_eager disable_cuda_graph cuda_graph_max_bs "
            "max_seq_len_to_capture enable_torch_compile compilation_config enable_chunked_prefill flash_attn "
            "offload_kqv use_mmap use_mlock logits_all schedule_conservativeness stream_interval",
        ),
        **all_of(
            "no adapters are loaded beside a model; merge them into its weights",
            "enable_lora lora_path lora_paths lora_modules max_loras max_lora_rank",
        ),
        **all_of(
            "no second model guesses; draft_tokens= says how much is guessed out of the text itself",
            "draft_model speculative_model speculative_config speculative_algorithm speculative_draft_model_path "
            "num_speculative_tokens speculative_num_steps",
        ),
        **all_of("no model that runs here was trained to embed texts", "embedding is_embedding runner task"),
        **all_of(
            "nothing is downloaded: hf download NAME --local-dir FOLDER gets a model, nw.Engine('FOLDER') runs it",
            "download_dir cache_dir hf_token revision",
        ),
        **all_of(
            "host_cache_bytes= is the memory for what leaves the KV cache, in bytes",
            "swap_space cpu_offload_gb hicache_size hicache_ratio enable_hierarchical_cache",
        ),
        **all_of("the environment says so, before Python starts: OMP_NUM_THREADS=4", "n_threads n_threads_batch"),
        **all_of(
            "leave it out: engine.stats() and engine.tree() tell what it does, and niwaki serve has logs and metrics",
            "verbose log_level disable_log_stats enable_metrics",
        ),
        **all_of("it is an option of niwaki serve: --model-name", "served_model_name model_alias"),
        **all_of("no backend reads images", "limit_mm_per_prompt mm_processor_kwargs"),
        **all_of(
            "it is one of the sampling_params: engine.generate(prompt, {'max_tokens': 16})",
            "n_predict max_tokens max_new_tokens temperature top_p top_k stop",
        ),
        **all_of(
            "an engine runs on one device",
            "tp tp_size tensor_parallel_size pp_size pipeline_parallel_size dp_size data_parallel_size n_gpu_layers "
            "main_gpu base_gpu_id tensor_split distributed_executor_backend",
        ),
        **all_of("leave it out: no code comes out of a checkpoint", "trust_remote_code"),
        **all_of(
            "it stands in the model's folder",
            "tokenizer tokenizer_path tokenizer_mode chat_template chat_format hf_overrides rope_scaling "
            "rope_freq_base",
        ),
    }
)
