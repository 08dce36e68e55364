"""Calls and results in templates of other makes: told as each writes them, and never more than text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.api import Message, ModelError, RequestError, Segment, Tool, ToolCall, UnsupportedByBackend
from niwaki.runtime.api.calls import HERMES, LLAMA3
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from niwaki.runtime.server import chat
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.serve import serving
from tests.toy import make_model, make_tokenizer

LISTED = "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}<|end|>{% endfor %}"
# In the manner of Qwen: each call as JSON between two words, results as they are.
QWEN = (
    LISTED + "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
)
# In the manner of Llama: the arguments are parameters, and a result is written as JSON.
LLAMA = (
    LISTED + "{% for message in messages %}<|{{ message.role }}|>{% if message.tool_calls %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}"
    "{% else %}{{ message.content }}{% endif %}<|end|>{% endfor %}"
)
TALK = [
    Message("user", "Say it."),
    Message("assistant", "", (ToolCall("say", '{"text":"<|end|>"}', "c1"),)),
    Message("tool", 'He said "no".\n', call_id="c1"),
]


def rendered(tokenizer: Tokenizer, tools: list[Tool] | None = None) -> list[Segment]:
    return chat.segments(tokenizer, TALK, tools or [])


@pytest.mark.parametrize(
    ("template", "call", "result"),
    [
        (QWEN, '<tool_call>\n{"name": "say", "arguments": {"text": "<|end|>"}}\n</tool_call>', 'He said "no".\n'),
        (LLAMA, '{"name": "say", "parameters": {"text": "<|end|>"}}', '"He said \\"no\\".\\n"'),
    ],
)
def test_a_conversation_is_written_as_the_template_writes_it(
    tmp_path: Path, template: str, call: str, result: str
) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=template))
    segments = rendered(tokenizer, [Tool("say", "", "Say it")])
    text = "".join(segment.text for segment in segments)
    assert text == f"say: Say it<|end|><|user|>Say it.<|end|><|assistant|>{call}<|end|><|tool|>{result}<|end|>"
    end = tokenizer.token_id("<|end|>")
    assert tokenizer.encode(segments).count(end) == 4 if end is not None else 0


def test_the_format_of_calls_comes_from_the_template(tmp_path: Path) -> None:
    assert Tokenizer(make_tokenizer(tmp_path / "q", template=QWEN)).call_format is HERMES
    assert Tokenizer(make_tokenizer(tmp_path / "l", template=LLAMA)).call_format is LLAMA3
    plain = Tokenizer(make_tokenizer(tmp_path / "p", template="{{ messages[0].content }}"))
    with pytest.raises(UnsupportedByBackend, match="no form of tool calls"):
        _ = plain.call_format
    with pytest.raises(RequestError, match="control token"):
        Tokenizer(make_tokenizer(tmp_path / "c", template=QWEN)).check_tools([Tool("f", "", "Ends <|end|>")])


def test_markers_of_reasoning_are_the_folders_or_the_vocabularys(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    assert Tokenizer(folder).reasoning_markers is None
    config = folder / "tokenizer_config.json"
    text = config.read_text("utf-8").rstrip().removesuffix("}")
    config.write_text(text + ', "reasoning_markers": ["<a>", "</a>"]}', "utf-8")
    assert Tokenizer(folder).reasoning_markers == ("<a>", "</a>")
    config.write_text(text + ', "reasoning_markers": "<a>"}', "utf-8")
    with pytest.raises(ModelError, match="two texts"):
        _ = Tokenizer(folder).reasoning_markers


def test_a_form_that_is_kept_says_what_the_template_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=LLAMA))
    prompts = chat.Prompts(tokenizer)
    talk = [
        Message("user", "Say it."),
        Message("assistant", ""),
        Message("tool", 'A "word".'),
        Message("user", "Again."),
    ]
    for number in range(len(talk)):
        for _ in range(2):
            said = talk[: number + 1]
            assert prompts.segments(said) == chat.segments(tokenizer, said)
            assert prompts.segments(said, continues=True) == chat.segments(tokenizer, said, continues=True)
    other = [replace(message, content=message.content[::-1]) for message in talk]
    assert prompts.segments(other) == chat.segments(tokenizer, other) != prompts.segments(talk)
    assert prompts.segments(TALK) == chat.segments(tokenizer, TALK)
    assert prompts.segments(talk, [Tool("say", "", "Say it")]) != prompts.segments(talk)


# In the manner of Kimi: who speaks is named beside the role, as JSON where it is the assistant.
NAMING = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.name %}"
    "{{ message.name | tojson if message.role == 'assistant' else message.name }}: {% endif %}"
    "{{ message.content }}<|end|>{% endfor %}"
)


def test_who_speaks_is_named_where_the_template_names_him_and_the_name_is_no_more_than_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=NAMING))
    prompts, end = chat.Prompts(tokenizer), tokenizer.token_id("<|end|>")
    assert end is not None
    for name in ("Lena", "<|end|", "<|end|>", "\ue0000\ue001", 'Le"na'):
        said = [Message("user", "Hi.", name=name), Message("assistant", "Oh.", name=name), Message("user", "Hi.")]
        segments = prompts.segments(said)
        text = "".join(segment.text for segment in segments)
        written = json.dumps(name, ensure_ascii=False)
        assert text == f"<|user|>{name}: Hi.<|end|><|assistant|>{written}: Oh.<|end|><|user|>Hi.<|end|>"
        assert tokenizer.encode(segments).count(end) == 3
        assert segments == chat.segments(tokenizer, said)
    unnamed = Tokenizer(make_tokenizer(tmp_path / "u", template=QWEN))
    assert chat.segments(unnamed, said) == chat.segments(unnamed, [replace(one, name="") for one in said])


def test_a_template_that_tells_the_time_is_asked_each_time(tmp_path: Path) -> None:
    told = iter(["one", "two"])
    template = "{{ strftime_now('%H') }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=template))
    assert not tokenizer.has_lasting_template
    prompts = chat.Prompts(tokenizer)
    tokenizer._template.environment.globals["strftime_now"] = lambda form: next(told)
    texts = ["".join(segment.text for segment in prompts.segments([Message("user", "!")])) for _ in range(2)]
    assert texts == ["one!", "two!"]


# In the manner of Qwen 3: thinking is on unless it is told otherwise.
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{{ mood }}{% endif %}"
)


def test_variables_reach_the_template_that_reads_them(tmp_path: Path) -> None:
    prompts = chat.Prompts(Tokenizer(make_tokenizer(tmp_path, template=THINKING)))
    talk = [Message("user", "hi")]

    def prompt(**variables: object) -> str:
        return "".join(segment.text for segment in prompts.segments(talk, variables=variables))

    plain = "<|user|>hi<|end|><|assistant|>"
    assert prompt() == prompt(enable_thinking=True) == prompt(enable_thinking=None) == plain
    assert prompt(enable_thinking=False) == f"{plain}<think></think>"
    assert prompt(mood="glad") == f"{plain}glad"
    assert prompt() == plain, "nothing is left of what others said"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"enable_thinkin": False}, "does not read it; it reads enable_thinking, mood"),
        ({"messages": None}, "does not read it"),
        ({"bos_token": ""}, "does not read it"),
        ({"raise_exception": ""}, "does not read it"),
        ({"mood": "a <|end|> b"}, "control token"),
        ({"mood": "a <|en"}, "a part of one"),
        ({"mood": "d|> b"}, "a part of one"),
        ({"mood": "|end|"}, "a part of one"),
        ({"mood": "\ue0000\ue001"}, "control token"),
    ],
)
def test_a_variable_that_the_template_does_not_read_or_that_forges_a_token_is_refused(
    tmp_path: Path, variables: dict[str, object], said: str
) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=THINKING))
    with pytest.raises(ApiError, match=said) as refused:
        chat.Prompts(tokenizer).segments([Message("user", "hi")], variables=variables)
    assert refused.value.param == f"chat_template_kwargs.{next(iter(variables))}"


def test_what_a_template_sets_for_itself_is_no_variable_of_callers(tmp_path: Path) -> None:
    own = "{% if messages %}{% set rest = messages %}{% else %}{% set rest = [] %}{% endif %}{{ rest | length }}"
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=own))
    with pytest.raises(ApiError, match="does not read it; it reads no variables: leave them out"):
        chat.Prompts(tokenizer).segments([Message("user", "hi")], variables={"rest": "x"})


def test_no_two_variables_make_a_token_between_them(tmp_path: Path) -> None:
    beside = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ mood }}{{ tone }}<{{ kind }}>"
    tokenizer = Tokenizer(make_tokenizer(tmp_path, template=beside))
    prompts, talk = chat.Prompts(tokenizer), [Message("user", "hi")]
    fine = {"mood": "end < of", "tone": "a|b", "kind": "user"}
    assert "".join(one.text for one in prompts.segments(talk, variables=fine)) == "<|user|>hiend < ofa|b<user>"
    mark = "<|end|>"
    for cut in range(1, len(mark)):
        with pytest.raises(ApiError, match="a part of one"):
            prompts.segments(talk, variables={"mood": f"a {mark[:cut]}", "tone": f"{mark[cut:]} b"})
    with pytest.raises(ApiError, match="a part of one"):
        prompts.segments(talk, variables={"kind": mark[1:-1]})


def test_variables_of_a_template_that_is_none_are_refused_as_it_is(tmp_path: Path) -> None:
    prompts = chat.Prompts(Tokenizer(make_tokenizer(tmp_path, template="{% for %}")))
    with pytest.raises(ModelError, match="no Jinja template"):
        prompts.segments([Message("user", "hi")], variables={"mood": "glad"})


def test_chat_template_kwargs_are_what_the_template_reads(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", sharpness=3.0)
    make_tokenizer(folder, template=THINKING)
    with Engine(folder, kv_tokens=1024) as engine, serving(engine) as url:
        body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 1}

        def num_prompt_tokens(**variables: object) -> int:
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body | {"chat_template_kwargs": variables})
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens"])

        closed = len(engine.tokenizer.encode([Segment("<think></think>", control=True)]))
        assert num_prompt_tokens(enable_thinking=False) == num_prompt_tokens(enable_thinking=True) + closed
        refused = httpx2.post(f"{url}/v1/chat/completions", json=body | {"chat_template_kwargs": {"thinking": False}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "chat_template_kwargs.thinking")
