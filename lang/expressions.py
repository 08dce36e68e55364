"""What authors write: `gen`, `select`, roles. A misuse that can be seen here is refused here, on the author's line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from threading import TIMEOUT_MAX
from typing import NoReturn, get_args

from niwaki.lang.misfits import before_or_behind, explains_misfits, one_content
from niwaki.lang.nodes import Chain, Content, Expression, Gen, RoleBegin, RoleEnd, Select, Text, as_nodes, turn_named
from niwaki.lang.tools import ToolLike, ask_of, offers_of, with_reasoning
from niwaki.lang.types import Pattern, ValueType, grammar_type, regex_type, schema_type, stop_text, value_type
from niwaki.runtime.api import ConstraintError, ProgramError, SamplingOptions, Spacing, UnsupportedByBackend
from niwaki.runtime.api.choices import ChoicesMethod, method_of, token_length_normalized


@explains_misfits
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Pattern | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: object = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    regex: Pattern | Sequence[Pattern] | None = None,
    json_schema: Mapping[str, object] | str | type | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    max_new_tokens: int | None = None,
    timeout: float | None = None,
    json_spacing: Spacing | None = None,
    grammar: str | None = None,
    tools: Sequence[ToolLike] | None = None,
    tool_choice: str | Callable[..., object] | None = None,
    parallel_tool_calls: bool | None = None,
    reasoning: bool | int | None = None,
    separate_reasoning: bool = True,
    heal: bool | None = None,
) -> Gen | Select:
    """Generate text, and set the variable `name` to it.

    Options that are None come from `run`, else from the model, else from the defaults.

    - `max_tokens`, or `max_new_tokens`, is the budget. `stop` ends the text before one of its strings, `stop_regex`
      with its first match.
    - At most one constraint says what the text may be: `dtype`, whose value is of that type; `regex` (from a list of
      them, the text matches all); `choices`, which is `select`; `json_schema` (a dict, its text, or a type), with text
      as its value; `grammar` (Lark, or EBNF with `::=`). A `dtype` of a few values (a Literal, an Enum, a bool) is
      chosen as a whole by `exact`, or drawn if the temperature is above 0.
    - `json_spacing` says where blanks are in the JSON of a `dtype` or `json_schema`: "compact" (nowhere; the default),
      "spaced" (as `json.dumps`) or "free".
    - With `n` above 1 the value is a list of n values, and the state's text continues with the first.
    - With `tools` (Python functions, or dicts with name, description and parameters) the value is a `Call`, or a list
      of them with `parallel_tool_calls`; if the model calls none, it is what it would be without tools. `tool_choice`
      is "auto", "required", "none" or a tool.
    - With `reasoning` (True, or a budget in tokens) the model reasons before it answers. What it wrote there becomes
      the variable `<name>_reasoning_content`; with `separate_reasoning=False` it stays in the value, if that is text.
    - `return_logprob` also returns each token's log-probability, in `get_meta_info`. `logprob_start_len` is the first
      token of the text before for which it does so, as `input_token_logprobs`; the prompt is not healed then.
    - `heal=False` keeps the last tokens of the text before. Otherwise they are written again if what is generated may
      merge with them.
    - If the gen is not done `timeout` seconds after it was sent, its state and the forks of it end with TimedOut.
    - `return_text_in_logprobs` is SGLang's and changes nothing: tokens always come with their texts.

    Raises:
        RequestError: an option is out of its bounds.
        ConstraintError: the regex is malformed, or the type cannot be enforced exactly.
        ProgramError: options that exclude each other.
    """
    _check_name(name)
    check_timeout(timeout)
    _check_tokens(name, max_tokens, max_new_tokens)
    options = SamplingOptions(
        max_new_tokens=max_new_tokens if max_tokens is None else max_tokens,
        min_tokens=min_tokens,
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_text(stop_regex),
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        top_logprobs_num=top_logprobs_num,
        heal=heal,
        logprob_start_len=logprob_start_len,
    )
    constraints = {"dtype": dtype, "regex": regex, "choices": choices, "json_schema": json_schema, "grammar": grammar}
    given = [name for name, value in constraints.items() if value is not None]
    if len(given) > 1:
        raise ProgramError(f"a gen takes one constraint, got {' and '.join(given)}; keep one")
    ask = ask_of(tools, tool_choice, parallel_tool_calls, reasoning, separate_reasoning)
    if choices is not None:
        if ask is not None:
            raise ProgramError("a gen with choices is a select, which calls no tools and does not reason")
        return _select_of_gen(name, choices, choices_method, options, timeout)
    if choices_method is not None:
        raise ProgramError("choices_method needs choices")
    check_options(options)
    spacing = json_spacing or "compact"
    if spacing not in get_args(Spacing):
        raise ConstraintError(f"json_spacing must be one of {', '.join(get_args(Spacing))}, got {json_spacing!r}")
    if spacing != "compact" and dtype is None and json_schema is None:
        raise ProgramError("json_spacing is about the JSON of a dtype or json_schema; give one of them")
    kind: ValueType | None = None
    if regex is not None:
        kind = regex_type(regex)
    elif json_schema is not None:
        kind = schema_type(json_schema, spacing)
    elif grammar is not None:
        kind = grammar_type(grammar)
    elif dtype is not None:
        kind = value_type(dtype, spacing)
    return Gen(name, options, kind, timeout, dtype, ask)


@explains_misfits
def gen_int(name: str | None = None, **options: object) -> Gen:
    """`gen(dtype=int)`."""
    return _typed(int, name, options)


@explains_misfits
def gen_float(name: str | None = None, **options: object) -> Gen:
    """`gen(dtype=float)`."""
    return _typed(float, name, options)


@explains_misfits
def gen_bool(name: str | None = None, **options: object) -> Gen:
    """`gen(dtype=bool)`."""
    return _typed(bool, name, options)


@explains_misfits
def gen_string(name: str | None = None, **options: object) -> Gen:
    """`gen(dtype=str)`: a JSON string in the text, its content as the value."""
    return _typed(str, name, options)


@explains_misfits
def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str = token_length_normalized,
    timeout: float | None = None,
    heal: bool | None = None,
) -> Select:
    """Append the choice that the model finds likeliest by `choices_method`, and set the variable `name` to it.

    A method is "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "exact", or
    an object of yours (`niwaki.runtime.api.choices.ChoicesMethod`). `timeout` is as in `gen`. If the text before merges
    with a choice, its last tokens are scored as the tokenizer writes them with each choice; `heal=False` keeps them.

    Raises:
        ProgramError: no choices, an empty or repeated one, an unknown method, or a temperature above 0 (scores are
            compared, not sampled).
    """
    return _select("select", name, choices, temperature, choices_method, timeout, heal)


def _select(
    written: str,
    name: str | None,
    choices: Sequence[str] | None,
    temperature: float,
    choices_method: ChoicesMethod | str,
    timeout: float | None,
    heal: bool | None,
) -> Select:
    """As `select`; `written` is what the program calls it."""
    _check_name(name)
    check_timeout(timeout)
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ProgramError(f"{written} needs a list of choices, got {choices!r}{_as_choices(choices)}")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            remedy = "" if isinstance(choice, str) else "; values of other types: gen(dtype=Literal[...] or an Enum)"
            raise ProgramError(f"choices must be non-empty strings, got {choice!r}{remedy}")
    if len(set(choices)) < len(choices):
        repeated = next(choice for choice in choices if choices.count(choice) > 1)
        raise ProgramError(f"choice {repeated!r} is given twice")
    if temperature > 1e-5:
        raise ProgramError(f"{written} compares scores and does not sample: temperature must be 0, got {temperature}")
    if heal is not None and not isinstance(heal, bool):
        raise ProgramError(f"heal must be True or False, got {heal!r}")
    return Select(name, tuple(choices), method_of(choices_method), timeout, heal)


def image(source: object) -> NoReturn:
    """SGLang's name for a picture in the text. No model that runs here reads pictures, so it is refused.

    Raises:
        UnsupportedByBackend: always, on the line that asks for it.
    """
    raise UnsupportedByBackend(f"image({source!r}): no backend reads images; give the model a text that describes it")


def check_timeout(timeout: object) -> None:
    """Raises ProgramError: it is no number of seconds."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise ProgramError(f"timeout must be a number of seconds of at least 0, got {timeout!r}")
    if timeout is not None and timeout > TIMEOUT_MAX:  # no clock of threads counts so far
        raise ProgramError(
            f"timeout must be a number of seconds of at most {TIMEOUT_MAX:.0f}; leave it out for no limit"
        )


def separate_reasoning(content: Content, model_type: str | None = None) -> Chain:
    """SGLang's spelling of `gen(reasoning=True)`, for every gen in `content`. `model_type` changes nothing: the model's
    own markers are used.
    """
    nodes = as_nodes(content)
    return Chain(tuple(with_reasoning(node) if isinstance(node, Gen) else node for node in nodes))


@explains_misfits
def system(content: Content = "", tools: Sequence[ToolLike] | None = None) -> Chain:
    """A system turn in the model's own chat template. `tools`, in the first turn, tell the model what it may call."""
    return role("system", content, tools)


@explains_misfits
def user(content: Content = "", tools: Sequence[ToolLike] | None = None) -> Chain:
    """A user turn in the model's own chat template. `tools` is as in `system`, for chats without a system turn."""
    return role("user", content, tools)


@explains_misfits
def assistant(content: Content = "") -> Chain:
    """An assistant turn in the model's own chat template. A `gen` inside writes what the model answers."""
    return role("assistant", content)


def system_begin() -> RoleBegin:
    """Begin a system turn that is ended by `system_end()`."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """End the system turn that `system_begin()` began."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Begin a user turn that is ended by `user_end()`."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """End the user turn that `user_begin()` began."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Begin an assistant turn that is ended by `assistant_end()`."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """End the assistant turn that `assistant_begin()` began."""
    return RoleEnd("assistant")


def role(name: str, content: Content, tools: Sequence[ToolLike] | None = None) -> Chain:
    if isinstance(tools, str | Expression):
        raise ProgramError(one_content(name))
    nodes = as_nodes(content)
    for node in nodes:
        if isinstance(node, RoleBegin | RoleEnd):
            raise ProgramError(
                f"{turn_named(node.role)} stands inside {turn_named(name)}; turns follow each other, they do not nest"
            )
    generates = any(not isinstance(node, Text) for node in nodes)
    told = () if tools is None else tuple(one.tool for one in offers_of(tools))
    return Chain((RoleBegin(name, generates, told), *nodes, RoleEnd(name)))


def _check_tokens(name: str | None, max_tokens: object, max_new_tokens: int | None) -> None:
    """Raises ProgramError: something else was given in the place of `max_tokens`, or it was given twice."""
    if isinstance(max_tokens, type):
        raise ProgramError(
            f"{max_tokens.__name__} is no number of tokens; a type is given as dtype={max_tokens.__name__}"
        )
    if isinstance(max_tokens, str) and not max_tokens.isdecimal():
        raise ProgramError(
            f"gen takes the name of a variable and max_tokens, a whole number, got {name!r} and {max_tokens!r}"
            f"{before_or_behind('gen', max_tokens)}"
        )
    if max_tokens is not None and max_new_tokens is not None:
        raise ProgramError("max_tokens and max_new_tokens are the same option; give one of them")


def check_options(options: SamplingOptions) -> None:
    """Check each option by itself: what is left open here may come from elsewhere.

    Raises:
        RequestError: naming the option, its value and its bounds.
    """
    # min_tokens may be below a max_new_tokens that only `run` gives.
    (options if options.max_new_tokens is not None else replace(options, max_new_tokens=1_000_000)).resolve()


def _typed(dtype: type, name: str | None, options: dict[str, object]) -> Gen:
    for excluded in ("dtype", "regex", "choices", "choices_method", "json_schema", "json_spacing", "grammar"):
        if excluded in options:
            raise ProgramError(f"gen_{dtype.__name__} is typed already and takes no {excluded}")
    node = gen(name, dtype=dtype, **options)  # type: ignore[arg-type]  # names and types are gen's, which checks them
    assert isinstance(node, Gen)
    return node


def _select_of_gen(
    name: str | None,
    choices: Sequence[str],
    method: ChoicesMethod | str | None,
    options: SamplingOptions,
    timeout: float | None,
) -> Select:
    taken = ("temperature", "heal")
    said = [f for f in SamplingOptions.__slots__ if getattr(options, f) is not None and f not in taken]
    if said:
        raise ProgramError(f"a gen with choices is a select, which takes no {', '.join(said)}; leave it out")
    method = method or token_length_normalized
    return _select("gen(choices=...)", name, choices, options.temperature or 0.0, method, timeout, options.heal)


def _as_choices(given: object) -> str:
    """How what was given may be written."""
    if isinstance(given, type) and issubclass(given, Enum):
        return f"; write gen('x', dtype={given.__name__})"
    is_listable = isinstance(given, Iterable) and not isinstance(given, str | Sequence)
    return "; make a list of it" if is_listable else ""


def _check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        hint = before_or_behind("select", name) if isinstance(name, list | tuple) else ""
        raise ProgramError(f"a variable's name must be a non-empty string, got {name!r}{hint}")
