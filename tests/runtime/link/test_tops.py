"""The likeliest tokens of a text cross the link packed, and are on the other side what they were."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from niwaki.runtime.api import FinishReason, Output, TokenLogprob
from niwaki.runtime.api.likeliest import NOTHING, Likeliest, Packed, together
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import frames
from niwaki.runtime.server.openai_shapes import LOWEST_LOGPROB, ChatShape, CompletionShape


def packed(*tops: tuple[int, float]) -> Packed:
    ids, logprobs = zip(*tops, strict=True)
    return Packed(np.array(ids, np.int32).tobytes(), np.array(logprobs, np.float64).tobytes())


FIRST, SECOND = packed((300, -0.25), (301, -1.5)), packed((302, -0.125), (303, -np.inf))
OBJECTS = (
    (TokenLogprob(-0.25, 300, "300"), TokenLogprob(-1.5, 301, "301")),
    (TokenLogprob(-0.125, 302, "302"), TokenLogprob(-np.inf, 303, "303")),
)


def output(tops: object) -> Output:
    own = (TokenLogprob(-0.25, 300, "300"), TokenLogprob(-2.0, 304, "304"))
    return Output("ab", (300, 304), FinishReason("length"), 3, 0, logprobs=own, top_logprobs=tops)  # type: ignore[arg-type]


def over_the_link(outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    bare, tops = frames.bare(outputs)
    said = msgspec.msgpack.encode([frames.Ended(1, bare, 0, b"", tops)])
    (ended,) = msgspec.msgpack.decode(said, type=list[frames.Report])
    assert isinstance(ended, frames.Ended)
    return frames.whole(ended.outputs, ended.tops, str)


def test_they_are_the_same_objects_for_whoever_looks() -> None:
    tops = together([FIRST, SECOND], str)
    assert isinstance(tops, Likeliest)
    assert len(tops) == 2
    assert tops == OBJECTS
    assert (tops[1], tops[1:], list(tops)) == (OBJECTS[1], OBJECTS[1:], list(OBJECTS))
    assert repr(tops) == repr(OBJECTS)
    assert tops != OBJECTS[:1]
    assert hash(tops) == hash(OBJECTS)


def test_a_copy_is_a_tuple_and_takes_no_tokenizer_along() -> None:
    def text(token_id: int) -> str:  # cannot be pickled
        return str(token_id)

    told = output(together([FIRST, SECOND], text))
    for twin in (copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert twin == told
        assert twin.top_logprobs == OBJECTS
        assert type(twin.top_logprobs) is tuple


def test_a_text_of_which_less_is_known_somewhere_is_told_as_objects() -> None:
    assert together([FIRST, NOTHING], str) == (OBJECTS[0], ())
    assert together([NOTHING, NOTHING], str) == ((), ())
    assert together([], str) == ()


def test_outputs_arrive_as_they_were_and_most_of_them_packed() -> None:
    outputs = (output(together([FIRST, SECOND], str)), output(()), output(together([FIRST, NOTHING], str)))
    arrived = over_the_link(outputs)
    assert arrived == outputs
    assert isinstance(arrived[0].top_logprobs, Likeliest)
    assert outputs[0].top_logprobs == OBJECTS, "whoever sends them still has his own"
    assert over_the_link(outputs[1:2]) == outputs[1:2]


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
def test_an_answer_says_the_same_of_packed_ones_and_of_objects(kind: type[CompletionShape | ChatShape]) -> None:
    tokenizer = Tokenizer(MODEL_DIR)
    shape = CompletionShape(tokenizer, 2, None) if kind is CompletionShape else ChatShape(tokenizer, 2)
    of_packed = shape.whole(0, output(together([FIRST, SECOND], tokenizer.token_text)))
    assert of_packed == shape.whole(0, output(OBJECTS))
    assert f"{LOWEST_LOGPROB}" in json.dumps(of_packed, allow_nan=False)


def test_an_engine_gives_as_many_as_were_asked_for(engine: Engine) -> None:
    asked = {"max_new_tokens": 5, "temperature": 0.0, "return_logprob": True, "top_logprobs_num": 3}
    result: Any = engine.generate("The cat", {**asked, "ignore_eos": True})
    meta = result["meta_info"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [3] * 5
    for own, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0] == own, "the likeliest is the chosen one"
        assert [one[0] for one in top] == sorted((one[0] for one in top), reverse=True)
