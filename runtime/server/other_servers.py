"""Fields that vLLM's and SGLang's servers take beside OpenAI's: what they mean here, or what to use instead.

A field is taken where it means here what it means there. What has another meaning here, or none, is refused in words
that name ours; null, false and an empty list ask for nothing, and are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from niwaki.runtime.api import Choices, Constraint, Grammar, JsonSchema, Regex
from niwaki.runtime.server.wire import ChoiceTexts, Off, On, Pattern, Strict

_BLANKS = "json_spacing says where blanks stand"
_REQUEST_ID = "the header x-request-id names a request"
_PLAIN = "give text or input_ids"
_PLAIN_MESSAGES = "messages are of text alone"
_BEAMS = "it is about beam search; n gives several answers"
_IDS = "/generate tells the ids of tokens: output_ids"
_ADAPTERS = "one model is served, without adapters"

INSTEAD: Mapping[str, str] = {
    "allowed_token_ids": "regex, choices or a grammar say what may be written",
    "audio_data": _PLAIN,
    "bad_words": "a logit_bias of -100 keeps a token out",
    "chat_template": "the model's own template is used; /v1/completions takes a prompt that is written already",
    "custom_logit_processor": "regex, json_schema, ebnf and logit_bias say what may be written",
    "custom_params": "no processor of logits reads them; leave them out",
    "disable_additional_properties": "write additionalProperties: false into the schema",
    "disable_any_whitespace": _BLANKS,
    "documents": "write them into a message",
    "early_stopping": _BEAMS,
    "echo": "/v1/completions has it",
    "functions": "offer them as tools: {type: function, function: ...}",
    "guided_decoding_backend": "one engine enforces every constraint; leave it out",
    "guided_whitespace_pattern": _BLANKS,
    "image_data": _PLAIN,
    "input_embeds": _PLAIN,
    "kv_transfer_params": "one engine computes and generates; leave them out",
    "lora_id": _ADAPTERS,
    "lora_path": _ADAPTERS,
    "mm_processor_kwargs": _PLAIN_MESSAGES,
    "modalities": _PLAIN,
    "prompt_logprobs": "/v1/completions tells a prompt's log-probabilities: echo with logprobs",
    "request_id": _REQUEST_ID,
    "return_hidden_states": "states of the model are not told",
    "return_token_ids": _IDS,
    "return_tokens_as_token_ids": _IDS,
    "rid": _REQUEST_ID,
    "session_params": "/v1/sessions keeps conversations, /branches keeps prefixes",
    "structural_tag": "offer tools, or write a grammar",
    "thinking_token_budget": "reasoning_tokens is the budget of a span of reasoning",
    "token_ids_logprob": "return_logprob with top_logprobs_num tells the likeliest tokens",
    "truncate_prompt_tokens": "no prompt is cut; /tokenize counts its tokens",
    "use_beam_search": "n gives several answers",
    "video_data": _PLAIN,
    "vllm_xargs": "no plugin reads them; leave them out",
    "whitespace_pattern": _BLANKS,
}


def _ask_for_nothing(value: JsonValue, field: ValidationInfo) -> JsonValue:
    if value is not None and value is not False and value != []:
        said = INSTEAD[str(field.field_name)]
        raise PydanticCustomError("unsupported", "not supported: {said}", {"said": said})
    return value


def _be_one(value: float) -> float:
    if value != 1:
        raise PydanticCustomError("unsupported", "not supported: {said}", {"said": _BEAMS})
    return value


def _be_included(value: bool) -> bool:
    if not value:
        why = "reasoning is told, in reasoning_content; a client may leave it unread"
        raise PydanticCustomError("unsupported", "not supported: {said}", {"said": why})
    return value


_TRUE: dict[str, JsonValue] = {"type": "boolean", "const": True}
# The three, as a schema; `false` by itself would match nothing.
_NOTHING = {"anyOf": [{"type": "null"}, {"type": "boolean", "const": False}, {"type": "array", "maxItems": 0}]}
Unasked = Annotated[JsonValue, AfterValidator(_ask_for_nothing), WithJsonSchema(_NOTHING)]
# The text of a JSON schema, or the schema.
SchemaGiven = Annotated[Pattern | dict[str, JsonValue], Field(union_mode="left_to_right")]
VariableName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
Variable = bool | int | float | Annotated[str, Field(max_length=256)] | None
Variables = Annotated[
    dict[VariableName, Variable], Field(max_length=64, json_schema_extra={"additionalProperties": False})
]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of the first five."""

    json_schema: Annotated[SchemaGiven | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: ChoiceTexts | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_any_whitespace: Unasked = None
    disable_additional_properties: Unasked = None
    structural_tag: Unasked = None
    whitespace_pattern: Unasked = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = [self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(one is not None for one in given) != 1:
            raise PydanticCustomError("value_error", "give one of json, regex, choice, grammar and json_object")
        return self

    def constraint(self, in_json: Callable[[str], JsonSchema]) -> Constraint:
        if self.json_schema is not None:
            return in_json(_text_of(self.json_schema))
        if self.regex is not None:
            return Regex(self.regex)
        if self.choice is not None:
            return Choices(tuple(self.choice))
        if self.grammar is not None:
            return _grammar(self.grammar)
        return in_json('{"type":"object"}')


class FieldsOfOthers(Strict):
    """Of chat and of completions."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaGiven | None = None
    guided_regex: Pattern | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: Pattern | None = None
    # These have one meaning here: special tokens write nothing, no blanks stand between them, stops are cut off.
    skip_special_tokens: On | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: Off | None = None
    no_stop_trim: Off | None = None
    log_metrics: On | None = None  # every request is counted
    length_penalty: Annotated[float, AfterValidator(_be_one), WithJsonSchema({"type": "number", "const": 1})] | None = (
        None
    )
    allowed_token_ids: Unasked = None
    bad_words: Unasked = None
    custom_logit_processor: Unasked = None
    custom_params: Unasked = None
    early_stopping: Unasked = None
    guided_decoding_backend: Unasked = None
    guided_whitespace_pattern: Unasked = None
    kv_transfer_params: Unasked = None
    lora_path: Unasked = None
    mm_processor_kwargs: Unasked = None
    prompt_logprobs: Unasked = None
    request_id: Unasked = None
    return_hidden_states: Unasked = None
    return_token_ids: Unasked = None
    return_tokens_as_token_ids: Unasked = None
    rid: Unasked = None
    session_params: Unasked = None
    structural_tag: Unasked = None
    truncate_prompt_tokens: Unasked = None
    use_beam_search: Unasked = None
    vllm_xargs: Unasked = None

    def constraints_of_others(self, in_json: Callable[[str], JsonSchema]) -> dict[str, Constraint]:
        """By the field that holds it; `in_json` makes that of a schema."""
        found: dict[str, Constraint] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.constraint(in_json)
        if self.guided_json is not None:
            found["guided_json"] = in_json(_text_of(self.guided_json))
        if self.guided_regex is not None:
            found["guided_regex"] = Regex(self.guided_regex)
        if self.guided_choice is not None:
            found["guided_choice"] = Choices(tuple(self.guided_choice))
        if self.guided_grammar is not None:
            found["guided_grammar"] = _grammar(self.guided_grammar)
        return found


class ChatFieldsOfOthers(Strict):
    """Of chat alone."""

    chat_template_kwargs: Variables | None = None  # what the model's template reads
    add_generation_prompt: bool | None = None  # false: beside `continue_final_message` alone
    add_special_tokens: Off | None = None  # the template writes them all
    chat_template: Unasked = None
    documents: Unasked = None
    echo: Unasked = None
    functions: Unasked = None
    include_reasoning: Annotated[bool, AfterValidator(_be_included), WithJsonSchema(_TRUE)] | None = None
    thinking_token_budget: Unasked = None


class GenerateFieldsOfOthers(Strict):
    """Of /generate: what SGLang's clients send there beside the fields that are here."""

    log_metrics: On | None = None  # every request is counted
    audio_data: Unasked = None
    custom_logit_processor: Unasked = None
    image_data: Unasked = None
    input_embeds: Unasked = None
    lora_id: Unasked = None
    lora_path: Unasked = None
    modalities: Unasked = None
    return_hidden_states: Unasked = None
    session_params: Unasked = None
    token_ids_logprob: Unasked = None
    video_data: Unasked = None


def _text_of(schema: str | dict[str, JsonValue]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _grammar(text: str) -> Grammar:
    """Two notations share the field: only EBNF begins its rules with `name ::=`."""
    # Blanks of the rule's own line alone: over those of lines before it, each empty line would look through all others.
    return Grammar(text, "ebnf" if re.search(r"^[^\S\n]*[\w.-]+\s*::=", text, re.MULTILINE) else "lark")
