"""Every family against transformers: the same logits on small random weights, however the tokens are cut and cached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from niwaki.kernels.rope import LinearScaling, LongRopeScaling
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import ConfigError, ModelError
from niwaki.runtime.checkpoint.loader import open_checkpoint, read_model_folder
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models import ARCHITECTURES, family_of
from niwaki.runtime.models.config import Experts, Family, ModelConfig, parse_config
from niwaki.runtime.models.positions import Rope
from niwaki.runtime.models.weights import expected_tensors
from tests.families import FULL, MODELS, SLIDING, VOCAB, make_pair
from tests.reference import Ids, Pair, Sequenced, difference, run
from tests.toy import VOCAB_SIZE, make_tokenizer

PAGE_SIZE = 4


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("model"))


def load(pair: Pair) -> Runner:
    return Runner.load(pair.folder, num_pages=80, page_size=PAGE_SIZE)


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, VOCAB, count).astype(np.int32)


def test_a_prompt_gives_the_logits_of_transformers_whole_and_in_chunks(pair: Pair) -> None:
    rng = np.random.default_rng(1)
    ids = random_ids(rng, 75)
    expected = pair.logits(ids)
    assert expected.std() > 0.05, "the weights say something"
    runner = load(pair)
    for length in (1, 8, 75):
        got = runner.forward([Row(ids[:length], 0, range(30), length)])
        assert (got - expected[:length]).abs().max() < 1e-4
    chunked = Sequenced(ids, [int(page) for page in rng.permutation(80)[:19]])
    run(runner, [chunked], rng, largest=30)
    assert difference(chunked, expected) < 1e-4


def test_a_ragged_batch_with_a_cached_prefix_gives_each_request_the_logits_it_has_alone(pair: Pair) -> None:
    rng = np.random.default_rng(2)
    runner = load(pair)
    first = Sequenced(random_ids(rng, 30), list(range(8)))
    run(runner, [first], rng)
    shared = 21  # five whole pages and one token of the sixth
    runner.copy_pages([PageCopy(5, 20, 1)])
    sequences = [
        Sequenced(
            np.concatenate([first.ids[:shared], random_ids(rng, 26)]), [0, 1, 2, 3, 4, *range(20, 27)], done=shared
        ),
        Sequenced(random_ids(rng, 5), [30, 31]),
        Sequenced(random_ids(rng, 33), list(range(40, 49))),
    ]
    run(runner, sequences, rng, largest=20)
    for sequence in (first, *sequences):
        assert difference(sequence, pair.logits(sequence.ids)) < 1e-4


def test_weights_and_cache_of_8_bits_are_near(pair: Pair) -> None:
    """In every family, as far as choices of experts that turn allow."""
    ids = random_ids(np.random.default_rng(3), 40)
    kv_dtype = "auto" if read_model_folder(pair.folder).config.latent else "int8"

    def logits(dtype: str, weights: str, kv_dtype: str) -> torch.Tensor:
        made = Runner.load(
            pair.folder, dtype=dtype, weights=weights, kv_dtype=kv_dtype, num_pages=20, page_size=PAGE_SIZE
        )
        return made.forward([Row(ids, 0, range(10), 40)])

    exact, small = logits("float32", "auto", "auto"), logits("bfloat16", "int8", kv_dtype)
    assert (small - exact).square().mean().sqrt() < 0.2 * exact.std()


def test_all_that_sets_a_family_apart_shows_in_its_logits(pair: Pair) -> None:
    """Else the comparisons above would prove nothing about it."""
    config = read_model_folder(pair.folder).config
    read = open_checkpoint(read_model_folder(pair.folder), torch.device("cpu")).read
    ids = random_ids(np.random.default_rng(3), 40)

    def logits(config: ModelConfig) -> torch.Tensor:
        return Runner(config, read, num_pages=20, page_size=PAGE_SIZE).forward([Row(ids, 0, range(10), 40)])

    truth = logits(config)
    llama = {one.name: one.default for one in fields(ModelConfig)}
    arithmetic = {
        name: llama[name]
        for name in ("rope_scaling", "rotary_dim", "qk_norm", "norm_offset", "embedding_scale", "residual_scale",
                     "attention_scale", "attention_cap", "logit_scale", "logit_cap", "activation", "has_sinks",
                     "temperature", "is_rope_interleaved")
        if getattr(config, name) != llama[name]
    }  # fmt: skip
    if isinstance(config.rope_scaling, LongRopeScaling):
        del arithmetic["rotary_dim"]  # its factors fit no other; phi3 shows it
    if config.latent is not None:  # the shapes that its cache has follow from these
        del arithmetic["rotary_dim"], arithmetic["attention_scale"]
    for name, value in arithmetic.items():
        assert (logits(_with(config, {name: value})) - truth).abs().max() > 1e-3, name
    for change in ({"window": None}, {"chunk": None}, {"rope": "main"}):
        kinds = tuple(replace(kind, **change) for kind in config.layer_kinds)
        if kinds != config.layer_kinds:
            assert (logits(replace(config, layers=kinds)) - truth).abs().max() > 1e-3, change
    if config.experts is not None:
        plain = Experts(config.experts.count, config.experts.per_token, config.experts.width, renormalise=False)
        changed: dict[str, object] = {"renormalise": not config.experts.renormalise}
        for one in ("score", "scale", "groups", "has_correction", "weighs_input", "has_router_bias", "has_bias"):
            if getattr(config.experts, one) != getattr(plain, one):
                changed[one] = getattr(plain, one)
        for one, value in changed.items():
            groups = {"groups_per_token": 1} if one == "groups" else {}
            other = replace(config.experts, **{one: value, **groups})  # type: ignore[arg-type]  # by name
            assert (logits(replace(config, experts=other)) - truth).abs().max() > 1e-3, one


def _with(config: ModelConfig, changes: Mapping[str, object]) -> ModelConfig:
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    return ModelConfig(**{**values, **changes})


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma2", "gemma3", "mixtral", "gpt-oss", "llama4", "deepseek-v3"])
def test_bfloat16_is_as_near_to_the_truth_as_transformers_is(name: str, tmp_path: Path) -> None:
    """The truth: the same rounded weights, computed in float32."""
    every = {"num_experts_per_tok": 5} if name == "gpt-oss" else {}  # then none is chosen by a rounding
    pair = make_pair(name, tmp_path, torch.bfloat16, **every)
    rng = np.random.default_rng(4)
    sequence = Sequenced(random_ids(rng, 75), list(range(19)))
    run(load(pair), [sequence], rng)
    truth = pair.in_float32().logits(sequence.ids)
    # The median over tokens: where two experts score alike, rounding may choose another, and either may be luckier.
    error = (torch.cat(sequence.logits) - truth).square().mean(-1).sqrt().median()
    assert error <= 1.2 * (pair.logits(sequence.ids) - truth).square().mean(-1).sqrt().median()


SEEING = [name for name, (architecture, _) in MODELS.items() if architecture.endswith("ForConditionalGeneration")]


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_also_sees_may_be_stored_under_the_names_that_transformers_has_in_memory(
    name: str, shard_size: str, tmp_path: Path
) -> None:
    pair = make_pair(name, tmp_path / "published")
    pair.reference.save_pretrained(tmp_path / "other", save_original_format=False, max_shard_size=shard_size)
    assert (tmp_path / "other" / "model.safetensors.index.json").exists() == (shard_size == "50KB")
    other = Pair(pair.reference, tmp_path / "other")
    ids = random_ids(np.random.default_rng(6), 20)
    got = load(other).forward([Row(ids, 0, range(5), 20)])
    assert (got - pair.logits(ids)).abs().max() < 1e-4
    assert torch.equal(got, load(pair).forward([Row(ids, 0, range(5), 20)]))


JOINED = "ernie-moe mixtral qwen2-moe qwen3-moe olmoe glm4-moe minimax-m2 deepseek-v2 deepseek-v3".split()


@pytest.mark.parametrize("name", JOINED)
def test_experts_may_be_stored_as_one_tensor_of_all(name: str, tmp_path: Path) -> None:
    """As transformers has them in memory."""
    pair = make_pair(name, tmp_path / "published")
    pair.reference.save_pretrained(tmp_path / "other", save_original_format=False)
    names = load_file(tmp_path / "other" / "model.safetensors")
    assert any(key.endswith(".mlp.experts.gate_up_proj") for key in names)
    assert not any("experts.0" in key for key in names)
    ids = random_ids(np.random.default_rng(6), 20)
    other, published = (
        Runner.load(folder, num_pages=5).forward([Row(ids, 0, range(5), 20)])
        for folder in (tmp_path / "other", tmp_path / "published")
    )
    assert (other - pair.logits(ids)).abs().max() < 1e-4
    assert torch.equal(other, published)


@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe", "deepseek-v2"])
def test_the_engine_writes_what_transformers_would(name: str, tmp_path: Path) -> None:
    pair = make_pair(name, tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=1)
    make_tokenizer(tmp_path)
    head = [int(token) for token in np.random.default_rng(5).integers(5, VOCAB_SIZE, 30)]
    prompts = [[*head, 7, 11], [*head, 300], [9, 8]]
    with Engine(tmp_path, kv_tokens=512) as engine:
        results = [
            engine.generate(
                input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
            )
            for ids in prompts
        ]
    for ids, result in zip(prompts, results, strict=True):
        assert isinstance(result, dict)
        known = list(ids)
        output_ids = result["output_ids"]
        assert isinstance(output_ids, list)
        for token in output_ids:
            last = pair.logits(np.array(known, np.int32))[-1]
            assert last[token] >= last.max() - 1e-3, "the best token, or one that rounding cannot tell from it"
            known.append(token)
        assert len(known) == len(ids) + 8


def test_latent_attention_is_refused_where_bits_must_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_pair("deepseek-v3", tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=1)
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="deterministic=True is not there for DeepseekV3ForCausalLM"):
        Engine(tmp_path, kv_tokens=512, deterministic=True)


def test_every_registered_architecture_is_one_of_these() -> None:
    assert all(isinstance(family_of(name), Family) for name in ARCHITECTURES)
    assert {architecture for architecture, _ in MODELS.values()} == set(ARCHITECTURES)


# ---------------------------------------------------------------------------------------------------------------
# Configs as older files spell them
# ---------------------------------------------------------------------------------------------------------------

PLAIN: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 131_072,
}


def parse(architecture: str, **options: object) -> ModelConfig:
    return parse_config({"architectures": [architecture], **PLAIN, **options})


def windows(config: ModelConfig) -> list[int | None]:
    return [kind.window for kind in config.layer_kinds]


def test_gemma_3_before_transformers_5_names_its_local_base_and_its_pattern() -> None:
    config = parse(
        "Gemma3ForCausalLM",
        rope_theta=1e6,
        rope_local_base_freq=5_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        sliding_window_pattern=3,
    )
    assert windows(config) == [512, 512, None, 512, 512, None]
    assert [kind.rope for kind in config.layer_kinds] == ["local", "local", "main", "local", "local", "main"]
    assert (config.rope_theta, config.rope_scaling) == (1e6, LinearScaling(8.0))
    assert config.local_rope == Rope(5_000.0)
    assert config.tie_embeddings
    assert config.activation == "gelu_tanh"


def test_gemma_3_with_an_image_encoder_says_little_and_means_its_defaults() -> None:
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "siglip_vision_model"},
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.rope_theta, config.rope_scaling) == (1e6, LinearScaling(8.0))
    assert config.local_rope == Rope(10_000.0)
    assert (config.eos_ids, config.dtype, config.tie_embeddings) == ((1, 106), "bfloat16", True)
    assert windows(config)[:7] == [1024] * 5 + [None, 1024]
    assert "language_model.model.layers.33.mlp.down_proj.weight" in expected_tensors(config)


def test_ministral_3_means_its_own_defaults_beside_an_image_encoder_too() -> None:
    silent = {
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "vocab_size": 131_072,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1},
    }
    alone = parse_config({"architectures": ["Ministral3ForCausalLM"], **silent})
    of_vision = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False}
    beside = parse_config({**of_vision, "text_config": {"model_type": "ministral3", **silent}})
    assert (alone.head_dim, alone.rms_norm_eps, alone.context_length) == (128, 1e-5, 262_144)
    assert replace(beside, architecture=alone.architecture, prefix=alone.prefix, ignored=alone.ignored) == alone


def test_qwen_2_vl_has_the_fields_of_its_text_beside_those_of_the_whole() -> None:
    """As Qwen2.5-VL-3B was published."""
    flat: dict[str, object] = {
        "eos_token_id": 151_645,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "max_position_embeddings": 128_000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1e6,
        "sliding_window": 32_768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151_936,
    }
    architecture = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 32}}
    config = parse_config({**architecture, "model_type": "qwen2_5_vl", **flat})
    assert (config.head_dim, config.num_kv_heads, config.rope_scaling, config.tie_embeddings) == (128, 2, None, True)
    assert config.qkv_bias
    assert not config.attention_bias
    names = expected_tensors(config)
    assert "model.layers.35.self_attn.q_proj.bias" in names
    assert "lm_head.weight" not in names
    assert {"visual.", "model.visual."} <= set(config.ignored)
    of_text = {key: value for key, value in flat.items() if key != "tie_word_embeddings"}
    nested = {"text_config": {"model_type": "qwen2_5_vl_text", **of_text}, "tie_word_embeddings": True}
    assert parse_config({**architecture, **nested}) == config


def test_qwen_3_vl_has_its_head_beside_the_trunk() -> None:
    text = {
        "model_type": "qwen3_vl_text",
        **PLAIN,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
    }
    names = expected_tensors(parse_config({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}))
    assert {"model.language_model.norm.weight", "lm_head.weight"} <= names.keys()
    assert names["model.language_model.layers.0.self_attn.q_norm.weight"] == (8,)


def test_older_files_say_the_same_otherwise() -> None:
    assert parse("GemmaForCausalLM", hidden_act="gelu", hidden_activation=None).activation == "gelu_tanh"
    assert parse("GemmaForCausalLM").activation == "gelu_tanh"
    minimax = parse("MiniMaxM2ForCausalLM", head_dim=128, rotary_dim=64, num_local_experts=8)
    assert minimax.rotary_dim == 64
    assert minimax == parse("MiniMaxM2ForCausalLM", head_dim=128, partial_rotary_factor=0.5, num_local_experts=8)
    published = {"use_qk_norm": True, "qk_norm_type": "per_layer", "num_local_experts": 8, "partial_rotary_factor": 0.5}
    assert minimax == parse("MiniMaxM2ForCausalLM", head_dim=128, **published)
    bare = parse("MiniMaxM2ForCausalLM", head_dim=128, **{**published, "use_qk_norm": False})
    assert bare == replace(minimax, qk_norm=None)
    assert not [name for name in expected_tensors(bare) if "q_norm" in name]
    first_dense = parse("Glm4MoeLiteForCausalLM", first_k_dense_replace=1)
    assert first_dense == parse("Glm4MoeLiteForCausalLM", mlp_layer_types=["dense"] + ["sparse"] * 5)
    assert [kind.is_sparse for kind in first_dense.layer_kinds] == [False] + [True] * 5
    for pattern in (3, "LLG"):
        exaone = parse("Exaone4ForCausalLM", sliding_window=64, sliding_window_pattern=pattern)
        assert windows(exaone) == [64, 64, None] * 2
        assert [kind.rope for kind in exaone.layer_kinds] == ["main", "main", "none"] * 2
    plain = parse("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern=None)
    assert {(kind.window, kind.rope) for kind in plain.layer_kinds} == {(None, "main")}


def test_windows_follow_each_familys_own_rule_where_no_list_says_so() -> None:
    assert windows(parse("Gemma2ForCausalLM")) == [4096, None] * 3
    assert windows(parse("MistralForCausalLM", sliding_window=None)) == [None] * 6
    assert windows(parse("MistralForCausalLM", sliding_window=64)) == [64] * 6
    qwen = {"sliding_window": 64, "max_window_layers": 4}
    assert windows(parse("Qwen2ForCausalLM", use_sliding_window=False, **qwen)) == [None] * 6
    assert windows(parse("Qwen2ForCausalLM", use_sliding_window=True, **qwen)) == [None] * 4 + [64] * 2
    assert [kind.rope for kind in parse("SmolLM3ForCausalLM", no_rope_layer_interval=3).layer_kinds] == [
        "main", "main", "none", "main", "main", "none",
    ]  # fmt: skip


def test_longrope_is_kept_to_the_context_that_its_short_factors_serve() -> None:
    config = parse(
        "Phi3ForCausalLM",
        head_dim=16,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    )
    assert config.context_length == 4096
    assert config.rotary_dim == 12
    assert isinstance(config.rope_scaling, LongRopeScaling)
    assert config.rope_scaling.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)


@pytest.mark.parametrize(
    ("architecture", "options", "said"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is not supported, got 8.0; supported: null"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("MinistralForCausalLM", {"layer_types": ["chunked_attention"] * 6}, "'chunked_attention' is not supported"),
        ("MinistralForCausalLM", {"layer_types": [FULL]}, "a type for each of 6 layers"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a whole number of at least 1, got 0"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 6}, "must list attention for each of 6 layers"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["attention"] * 6}, "num_local_experts must be 0 in Granite 4"),
        ("GemmaForCausalLM", {"hidden_act": "relu"}, "hidden_activation 'relu' is not supported"),
        (
            "SeedOssForCausalLM",
            {"attention_bias": False, "attention_out_bias": True},
            "attention_out_bias must be false",
        ),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LX"}, "must be a number of layers, or L and G, got 'LX'"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "must list dense or sparse for 6 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, "no_rope_layers must list 0 or 1 for each of 6 layers"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
        ("Qwen3ForCausalLM", {"partial_rotary_factor": 0.5}, "must be 1 for Qwen3ForCausalLM, got 0.5"),
        ("Gemma3ForConditionalGeneration", {}, "text_config must be an object, got None"),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "mistral4"}},
            "text_config: model_type 'mistral4' is not supported; supported: mistral, ministral3",
        ),
        ("MambaForCausalLM", {}, "MambaForCausalLM is not supported; supported: LlamaForCausalLM, Mistral"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported; supported:"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 0 or 1 for each of 6 layers"),
        ("Llama4ForCausalLM", {"layer_types": [SLIDING] * 6}, "must list chunked_attention or full_attention"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported:"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob must be false in DeepSeek-V2"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, "256 experts in 7 groups"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number"),
        ("Qwen2ForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, "quantization 'hqq' is not supported"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(architecture, **options)
    assert said in str(caught.value)


def test_a_family_opens_from_a_folder_with_its_end_tokens(tmp_path: Path) -> None:
    make_pair("qwen3", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "top_k": 20}))
    folder = read_model_folder(tmp_path)
    assert folder.config.eos_ids == (7, 9)
    assert folder.generation_defaults.top_k == 20
