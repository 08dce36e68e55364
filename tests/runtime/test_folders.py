"""Model folders as they are found, stored otherwise than transformers stores them today: read as transformers reads
them, or refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from niwaki.runtime.api import Message, ModelError
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.forward.runner import Row, Runner
from tests.families import VOCAB, make_pair
from tests.reference import Pair, open_reference
from tests.toy import make_tokenizer

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Qwen 2, whose head is its embedding."""
    return make_pair("qwen2", tmp_path / "model").folder


def restore(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def configure(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def logits(folder: Path) -> torch.Tensor:
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).astype(np.int32)
    return Runner.load(folder, num_pages=4).forward([Row(ids, 0, range(2), 20)])


def theirs(folder: Path) -> torch.Tensor:
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).astype(np.int32)
    return Pair(open_reference(folder, torch.float32), folder).logits(ids)


def with_other_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: 2 * tensors[EMBEDDING].flip(0)}


def test_a_head_that_is_stored_and_is_another_is_not_the_embedding_whatever_the_config_says(folder: Path) -> None:
    tied = logits(folder)
    restore(folder, with_other_head)
    got = logits(folder)
    assert (got - theirs(folder)).abs().max() < 1e-4
    assert torch.equal(got, 2 * tied.flip(1))
    assert not read_model_folder(folder).config.tie_embeddings


def test_a_head_that_is_stored_and_the_same_is_read_once(folder: Path) -> None:
    tied = logits(folder)
    restore(folder, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING]})
    assert read_model_folder(folder).config.tie_embeddings
    assert torch.equal(logits(folder), tied)
    restore(folder, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].bfloat16()})
    assert not read_model_folder(folder).config.tie_embeddings, "another type, other numbers"


@pytest.mark.parametrize("name", ["qwen2", "gemma3-vision"])
def test_where_they_are_one_the_head_may_stand_for_the_embedding(name: str, tmp_path: Path) -> None:
    pair = make_pair(name, tmp_path)
    pair.reference.save_pretrained(tmp_path, save_original_format=False)
    tied = logits(tmp_path)
    embedding = EMBEDDING if name == "qwen2" else "model.language_model.embed_tokens.weight"
    restore(tmp_path, lambda tensors: {HEAD if key == embedding else key: its for key, its in tensors.items()})
    assert torch.equal(logits(tmp_path), tied)
    configure(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks tensor .*embed_tokens\.weight"):
        Runner.load(tmp_path, num_pages=4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_where_the_config_is_silent_the_files_tell_the_dtype(stored: torch.dtype, folder: Path) -> None:
    restore(folder, lambda tensors: {name: tensor.to(stored) for name, tensor in tensors.items()})
    configure(folder, dtype=None, torch_dtype=None)
    wanted = "bfloat16" if stored == torch.bfloat16 else "float32"
    assert read_model_folder(folder).config.dtype == wanted
    configure(folder, dtype="float32")
    assert read_model_folder(folder).config.dtype == "float32", "what it says counts"


def test_shards_tell_it_too(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    configure(folder, dtype=None, torch_dtype=None)
    assert read_model_folder(folder).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors is no part of an index"),
        ("consolidated.safetensors", "consolidated.safetensors has its makers' names"),
        ("adapter_model.safetensors", "adapter_model.safetensors is an adapter: merge it"),
        ("model-q4.gguf", "model-q4.gguf is a file of llama.cpp"),
        ("pytorch_model.bin", "pytorch_model.bin holds pickled code, convert it to safetensors: AutoModelForCausalLM"),
        ("consolidated.00.pth", "consolidated.00.pth holds pickled code"),
    ],
)
def test_weights_in_other_files_are_refused_with_what_to_do(file: str, said: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(ModelError) as caught:
        Runner.load(folder, num_pages=4)
    assert f"neither model.safetensors nor model.safetensors.index.json; {said}" in str(caught.value)


def test_a_folder_without_a_tokenizer_says_what_stands_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json$"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; tokenizer\.model is not read: AutoTokenizer"):
        Tokenizer(tmp_path)


def test_a_chat_template_stands_in_one_of_three_files(tmp_path: Path) -> None:
    """The later ones win here, as they are put there."""
    make_tokenizer(tmp_path, template=None)

    def said() -> str:
        return Tokenizer(tmp_path).render([Message("user", "hi")], add_generation_prompt=False)

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json: {{ messages[0].content }}"}))
    assert said() == "json: hi"
    make_tokenizer(tmp_path, template="config: {{ messages[0].content }}")
    assert said() == "config: hi"
    (tmp_path / "chat_template.jinja").write_text("jinja: {{ messages[0].content }}")
    assert said() == "jinja: hi"
