"""The tokenizer: special tokens only from templates, characters never cut, bytes exact for both kinds of vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from niwaki.runtime.api import (
    Message,
    ModelError,
    ProgramError,
    RequestError,
    Segment,
    ToolCall,
    UnsupportedByBackend,
)
from niwaki.runtime.checkpoint.tokenizer import Tokenizer, byte_alphabet
from tests.toy import make_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(make_tokenizer(tmp_path))


def test_user_text_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|end|>")
    assert end in tokenizer.encode([Segment("<|end|>", control=True)])
    ids = tokenizer.encode([Segment("<|end|> <|user|>")])
    assert end not in ids
    assert tokenizer.decode(ids) == "<|end|> <|user|>"


def test_a_text_is_encoded_as_its_only_segment_would_be(tokenizer: Tokenizer) -> None:
    text = "the cat <|end|>"
    assert tokenizer.encode(text) == tokenizer.encode([Segment(text)])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_round_trips_and_pieces_of_one_kind_are_encoded_together(tokenizer: Tokenizer) -> None:
    text = "the naïve café 東京 🦊 <|x|>"
    ids = tokenizer.encode([Segment(text)])
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode([Segment("the na"), Segment("ïve café 東京 🦊 <|x|>")]) == ids


def test_beginning_of_text_is_added_once(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_ids
    assert len(bos) == 1
    assert tuple(tokenizer.encode([Segment("cat")], at_start=True)[:1]) == bos
    assert tuple(tokenizer.encode([Segment("cat")])[:1]) != bos
    templated = tokenizer.encode([Segment("<|bos|><|user|>", control=True), Segment("cat")], at_start=True)
    assert templated.count(bos[0]) == 1


def test_pieces_of_incremental_decoding_add_up_and_are_whole_characters(tokenizer: Tokenizer) -> None:
    draw = random.Random(3)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(0, 20))]
        incremental = tokenizer.detokenizer()
        pieces = [incremental.push(i) for i in ids]
        assert "".join(pieces) + incremental.finish() == tokenizer.decode(ids)
    ids = tokenizer.encode([Segment("🦊東京")])
    incremental = tokenizer.detokenizer()
    assert all("\ufffd" not in incremental.push(i) for i in ids)


def test_byte_alphabet_is_a_bijection_on_all_bytes() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 32
    assert alphabet["A"] == 65


def test_sentencepiece_vocabularies_are_read_as_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xE6>": 1, "<0x9D>": 2, "<0xB1>": 3, "\u2581cat": 4, "s": 5}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens(["<unk>"])
    built.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer(tmp_path)
    assert loaded.token_bytes[:6] == (None, b"\xe6", b"\x9d", b"\xb1", b" cat", b"s")
    assert loaded.decode([4, 5, 1, 2, 3]) == " cats東"


def test_no_text_has_fewer_tokens_than_its_characters_say(tokenizer: Tokenizer) -> None:
    most = tokenizer.most_chars
    assert most == max(len(piece or b"") for piece in tokenizer.token_bytes)
    draw = random.Random(0)
    for _ in range(100):
        text = "".join(
            draw.choices(["the cat sat", " ", "\n", "café", "東京", "<|end|>", "\0"], k=draw.randrange(1, 30))
        )
        assert len(tokenizer.encode(text)) * most >= len(text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel",
         "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}},
        {"added_tokens": [{"id": 0, "content": "<|pad|>", "single_word": False, "lstrip": True, "rstrip": False,
         "normalized": False, "special": False}]},
        {"pre_tokenizer": None},
    ],
    ids=["a normaliser", "a cut", "blanks removed", "blanks split off", "blanks in a token", "no bytes"],
)  # fmt: skip
def test_where_a_text_may_lose_characters_nothing_is_said_of_their_number(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = make_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert Tokenizer(tmp_path).most_chars is None


def test_the_chat_template_renders_and_refuses(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render([Message("user", "hi")], add_generation_prompt=True)
    assert rendered == "<|bos|><|user|>hi<|end|><|assistant|>"
    with pytest.raises(ProgramError, match="no role wizard"):
        tokenizer.render([Message("wizard", "hi")], add_generation_prompt=False)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedByBackend, match="no chat template"):
        Tokenizer(make_tokenizer(tmp_path, template=None)).render([Message("user", "hi")], add_generation_prompt=True)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ProgramError):
        Tokenizer(make_tokenizer(tmp_path, template=evil)).render([Message("user", "hi")], add_generation_prompt=False)


def test_bad_input_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode([Segment("ab\ud800")])
    with pytest.raises(ModelError, match=r"nowhere has no tokenizer\.json$"):
        Tokenizer(tmp_path / "nowhere")


def test_a_template_that_breaks_says_which_roles_it_had(tmp_path: Path) -> None:
    breaks = Tokenizer(make_tokenizer(tmp_path / "breaks", template="{{ messages[0].content + 1 }}"))
    with pytest.raises(ProgramError, match=r"refuses the roles \['user'\]: TypeError: can only concatenate str"):
        breaks.render([Message("user", "hi")], add_generation_prompt=True)
    none = Tokenizer(make_tokenizer(tmp_path / "none", template="{% for %}"))
    with pytest.raises(ModelError, match="no Jinja template: Expected an expression"):
        none.render([Message("user", "hi")], add_generation_prompt=True)
    calls = [Message("assistant", "", calls=(ToolCall("f", "{"),))]
    with pytest.raises(RequestError, match="arguments are not JSON"):
        breaks.render(calls, add_generation_prompt=True)
