"""Text to token ids and back: encoding, incremental decoding, and the model's own chat template.

Reads tokenizer.json and tokenizer_config.json of a model folder. Text of users is encoded with special tokens off:
only `control` segments, which come from a template, may produce them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from niwaki.runtime.api import (
    CallFormat,
    Message,
    ModelError,
    ProgramError,
    RequestError,
    Segment,
    Tool,
    UnsupportedByBackend,
)
from niwaki.runtime.api.calls import REASONING_MARKERS, format_of
from niwaki.runtime.checkpoint.template_reads import names_read

PASSING = ("strftime_now", "random", "lipsum")  # what a template may ask that has another answer each time
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")  # as templates call the tokens
LONG_CHARS = 256  # a text of so many is worth another thread, which the library hands it to


class Tokenizer:
    """The tokenizer of one model folder. Immutable after construction, safe to use from several threads.

    Raises:
        ModelError: a file is missing or is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json{_other_tokenizer(folder)}")
        try:
            self._control = tokenizers.Tokenizer.from_file(str(path))
            self._content = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a missing or malformed file
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
        self._content.encode_special_tokens = True
        self._config = _read_json(folder / "tokenizer_config.json")
        # Of the file no more than is asked for: all of it as Python's objects takes 50 MB for 150,000 tokens.
        told = json.loads(path.read_text(encoding="utf-8"))
        self._decoder = told.get("decoder")
        self._leaves_nothing_out = _leaves_nothing_out(told)
        self._added_tokens: list[dict[str, object]] = told.get("added_tokens", [])
        self._template_source = _template_source(folder, self._config)
        self._tables: dict[tuple[str, ...], Sequence[bytes | None]] = {}
        self.bos_ids: tuple[int, ...] = tuple(self._control.encode("", add_special_tokens=True).ids)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that stand for something, special ones included."""
        return int(self._control.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """The id of one exact token, or None."""
        found = self._control.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, segments: str | Sequence[Segment], *, at_start: bool = False) -> list[int]:
        """Token ids of the segments, or of a text. `at_start` adds the beginning-of-text token unless a template wrote
        it."""
        if isinstance(segments, str):
            segments = (Segment(segments),)
        ids: list[int] = []
        for text, control in _merged(segments):
            encoder = self._control if control else self._content
            ids += _ids(encoder, _valid_text(text))
        if at_start and self.bos_ids and tuple(ids[: len(self.bos_ids)]) != self.bos_ids:
            ids[:0] = self.bos_ids
        return ids

    def plain_ids(self, text: str) -> list[int]:
        """The tokens of a text by itself, special ones never among them."""
        return _ids(self._content, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special tokens left out."""
        return b"".join(self.bytes_of(i) or b"" for i in token_ids).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """One token as text, for log-probabilities: bytes that are no character alone show as U+FFFD."""
        piece = self.bytes_of(token_id)
        return str(self._control.id_to_token(token_id) or "") if piece is None else piece.decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that one token writes; None for a special token and an unused id."""
        # A model may have more rows of logits than its tokenizer has tokens (padded embeddings): those write nothing.
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else None

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The bytes that each token id stands for; None for special tokens and unused ids."""
        to_bytes = _byte_reader(self._decoder)
        added = {entry["id"]: entry for entry in self._added_tokens}
        table: list[bytes | None] = []
        for token_id in range(self.vocab_size):
            token = self._control.id_to_token(token_id)
            if token is None or (token_id in added and added[token_id].get("special", False)):
                table.append(None)
            elif token_id in added:
                table.append(token.encode("utf-8"))
            else:
                table.append(to_bytes(token))
        return tuple(table)

    @cached_property
    def most_chars(self) -> int | None:
        """Characters that one token of a text stands for at most. None where nobody can say: a normaliser and the like
        may make a long text short."""
        return max(len(piece or b"") for piece in self.token_bytes) if self._leaves_nothing_out else None

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The special tokens: those that no text of a user ever becomes."""
        return {
            str(entry["content"]): int(str(entry["id"])) for entry in self._added_tokens if entry.get("special", False)
        }

    def detokenizer(self, shown: Sequence[str] = ()) -> Detokenizer:
        """`shown` holds the special tokens that are part of the text: markers, as they stand in it."""
        return Detokenizer(self._shown_bytes(shown) if shown else self.token_bytes)

    def _shown_bytes(self, shown: Sequence[str]) -> Sequence[bytes | None]:
        """`token_bytes` with the special tokens in `shown`. Few sets of markers are ever asked for: all are kept."""
        marks = tuple(mark for mark in self.special_ids if any(mark in text for text in shown))
        if marks not in self._tables:
            table = list(self.token_bytes)
            for mark in marks:
                table[self.special_ids[mark]] = mark.encode()
            self._tables[marks] = table
        return self._tables[marks]

    # -- chat -----------------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The model's chat template (Jinja, sandboxed) over `messages`, with the tools told to the model. `variables`
        are some of `template_variables`; what they hold becomes template text.

        Raises:
            UnsupportedByBackend: the model folder has no chat template.
            ModelError: the template is none.
            ProgramError: the template refuses these messages (roles out of order, say).
        """
        template = self._template
        offered = {"tools": [_tool_entry(tool) for tool in tools]} if tools else {}
        try:
            return str(
                template.render(
                    messages=[_message_entry(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **offered,
                    **(variables or {}),
                    **self._special_tokens,
                )
            )
        except RequestError:  # of a message, not of the template
            raise
        except Exception as error:  # whatever its expressions raise, as a sum of a text and a number
            roles = [m.role for m in messages]
            what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ProgramError(f"the model's chat template refuses the roles {roles}: {what}") from None

    @cached_property
    def call_format(self) -> CallFormat:
        """How the model writes calls, as its template shows.

        Raises:
            UnsupportedByBackend: the template has no form of calls that we know.
        """
        form = format_of(self._template_text)
        if form is None:
            raise UnsupportedByBackend(
                "this model's chat template has no form of tool calls that niwaki knows, so it cannot be offered tools"
            )
        return form

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """What is told of tools becomes template text, which may hold special tokens: that of tools must not.

        Raises:
            UnsupportedByBackend: as `call_format`. RequestError: a tool spells a special token.
        """
        _ = self.call_format
        for tool in tools:
            for mark in self.special_ids:
                if mark in tool.name or mark in tool.description or mark in tool.parameters:
                    raise RequestError(f"tool {tool.name!r} spells {mark!r}, which is a control token of this model")

    @cached_property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """What stands before and behind the model's reasoning: "reasoning_markers" of tokenizer_config.json, two texts,
        or the usual ones where the vocabulary has them as tokens.

        Raises:
            ModelError: the file names something else.
        """
        named = self._config.get("reasoning_markers")
        match named:
            case None:
                pass
            case [str(begin), str(end)] if begin and end:
                return begin, end
            case _:
                raise ModelError(f"reasoning_markers in tokenizer_config.json must be two texts, got {named!r}")
        for begin, end in REASONING_MARKERS:
            if self.token_id(begin) is not None and self.token_id(end) is not None:
                return begin, end
        return None

    @cached_property
    def reasons(self) -> bool:
        """Whether the model was made to reason before it answers: its template knows the markers of it.

        Raises:
            UnsupportedByBackend: the model folder has no chat template.
        """
        markers = self.reasoning_markers
        return markers is not None and markers[1] in self._template_text

    @cached_property
    def _template_text(self) -> str:
        source = self._template_source
        if isinstance(source, list):  # several named templates: the default one
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            raise UnsupportedByBackend(
                "this model has no chat template; write its prompt as plain text instead of roles"
            )
        return source

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """What else the template reads than messages, tools and the names of special tokens: `enable_thinking`, say.

        Raises:
            UnsupportedByBackend: the model folder has no chat template. ModelError: the template is none.
        """
        _ = self._template  # it can be read
        read = names_read(self._environment.parse(self._template_text))
        own = {"messages", "tools", "add_generation_prompt", *SPECIAL_NAMES}
        return frozenset(read - own - self._environment.globals.keys())

    @cached_property
    def has_lasting_template(self) -> bool:
        """Whether `render` says the same of the same messages whenever it is asked: some templates tell the date.

        Raises:
            UnsupportedByBackend: the model folder has no chat template.
        """
        return not any(name in self._template_text for name in PASSING)

    @cached_property
    def _template(self) -> Template:
        try:
            return self._environment.from_string(self._template_text)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is no Jinja template: {error}") from None

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in SPECIAL_NAMES:
            value = self._config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found


class Detokenizer:
    """Bytes of tokens to text as they come: never half a character, and the pieces add up to the whole."""

    def __init__(self, token_bytes: Sequence[bytes | None]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished, and for special tokens."""
        piece = self._token_bytes[token_id] if token_id < len(self._token_bytes) else None
        return self._decoder.decode(piece) if piece else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """`push` of several tokens, one behind the other."""
        known = self._token_bytes
        return self._decoder.decode(b"".join([known[i] or b"" for i in token_ids if i < len(known)]))

    def push_bytes(self, piece: bytes) -> str:
        """`push` of a token's last bytes alone."""
        return self._decoder.decode(piece)

    @property
    def is_between_characters(self) -> bool:
        return not self._decoder.getstate()[0]

    def finish(self) -> str:
        """What an unfinished character at the very end is shown as."""
        return self._decoder.decode(b"", final=True)


def _template_source(folder: Path, config: Mapping[str, object]) -> object:
    """A file of its own, else what tokenizer_config.json holds, else the JSON file that models with image encoders had
    before there were files of its own."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    inside = config.get("chat_template")
    return _read_json(folder / "chat_template.json").get("chat_template") if inside is None else inside


def _other_tokenizer(folder: Path) -> str:
    """What stands there in its place, and what to do about it."""
    for name in ("tokenizer.model", "vocab.json", "tekken.json"):
        if (folder / name).exists():
            return (
                f"; {name} is not read: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(OTHER) of "
                "transformers may make one of it"
            )
    return ""


def _merged(segments: Sequence[Segment]) -> list[tuple[str, bool]]:
    """Neighbouring segments of one kind as one text: how a program cut its text must not show in the tokens."""
    merged: list[tuple[str, bool]] = []
    for segment in segments:
        if merged and merged[-1][1] == segment.control:
            merged[-1] = (merged[-1][0] + segment.text, segment.control)
        else:
            merged.append((segment.text, segment.control))
    return merged


def _ids(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    """The text's tokens, none added."""
    if len(text) < LONG_CHARS:
        return list(encoder.encode(text, add_special_tokens=False).ids)
    # Without offsets, and with the interpreter left to the engine's thread: 0.5 us a character instead of 0.9.
    (found,) = encoder.encode_batch_fast([text], add_special_tokens=False)
    return list(found.ids)


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}: it is not valid Unicode"
        ) from None
    return text


def _leaves_nothing_out(told: Mapping[str, object]) -> bool:
    """Whether each character of a text stands in one of its tokens, by a tokenizer's file."""
    model, added = told.get("model"), told.get("added_tokens", [])
    if not isinstance(model, Mapping) or model.get("type") != "BPE" or not isinstance(added, list):
        return False
    if any(entry.get("lstrip") or entry.get("rstrip") for entry in added):
        return False
    vocabulary = model.get("vocab", ())
    has_all_bytes = all(sign in vocabulary for sign in byte_alphabet())  # else one is left out, or many are one unknown
    splits = _steps(told.get("pre_tokenizer"))
    is_whole = all(
        step.get("type") == "ByteLevel" or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in splits
    )
    is_by_bytes = any(step.get("type") == "ByteLevel" for step in splits)
    return has_all_bytes and is_by_bytes and is_whole and not (told.get("normalizer") or told.get("truncation"))


def _steps(pre_tokenizer: object) -> list[Mapping[str, object]]:
    if not isinstance(pre_tokenizer, Mapping):
        return []
    inner = pre_tokenizer.get("pretokenizers")
    return [step for each in inner for step in _steps(each)] if isinstance(inner, list) else [pre_tokenizer]


def _byte_reader(decoder: object) -> Callable[[str], bytes]:
    """How this tokenizer's tokens spell bytes: GPT-2's byte alphabet, or SentencePiece's blank and <0xNN>."""
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda token: bytes(alphabet[character] for character in token)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes
    raise ModelError(f"the tokenizer's decoder {sorted(kinds)} is not supported; ByteLevel and SentencePiece's are")


def _decoder_kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: the character that each byte is written as in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


def _message_entry(message: Message) -> dict[str, object]:
    """As templates read it: arguments as values, not as text."""
    entry: dict[str, object] = {"role": message.role, "content": message.content}
    if message.calls:
        entry["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _values(call.arguments)}}
            for call in message.calls
        ]
    if message.call_id:
        entry["tool_call_id"] = message.call_id
    if message.name:
        entry["name"] = message.name
    return entry


def _tool_entry(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": _values(tool.parameters or "{}")}
    return {"type": "function", "function": function}


def _values(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"a tool's parameters or a call's arguments are not JSON: {text[:100]!r}") from None


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return found
