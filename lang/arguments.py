"""What a call of a program is given: arguments of its function, and options of its run, told apart and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, TypedDict, cast

from niwaki.lang.backends import Host
from niwaki.lang.expressions import check_options, check_timeout
from niwaki.lang.foreign_names import RUN
from niwaki.lang.sessions import Session
from niwaki.lang.state import ForkGroup, State
from niwaki.lang.templates import TemplateFunction, template_function
from niwaki.lang.types import Pattern, stop_text
from niwaki.runtime.api import ProgramError, SamplingOptions
from niwaki.runtime.api.names import hint

Row: TypeAlias = Mapping[str, object] | tuple[object, ...]

SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingOptions)) - {"constraint"}
# Two spellings of one option. The second is the one that is kept.
_SPELLINGS = "max_tokens", "max_new_tokens"
# The last is SGLang's, and changes nothing: tokens are always told with their texts.
RUN_NAMES = SAMPLING_NAMES | {"backend", "stream", "timeout", "chat_template", "return_text_in_logprobs"}


class RunOptions(TypedDict, total=False):
    """The options of a run and their types, for type checkers: RUN_NAMES and the other spellings."""

    backend: Host | Session | None
    options: Mapping[str, object] | SamplingOptions | None
    stream: bool
    timeout: float | None
    chat_template: str | TemplateFunction | None
    max_tokens: int | None
    max_new_tokens: int | None
    min_tokens: int | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: Pattern | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    heal: bool | None
    priority: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call, taken apart: what the function gets, and what the run gets."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    options: SamplingOptions
    backend: Host | None
    stream: bool
    timeout: float | None
    template: TemplateFunction | None
    session: Session | None


class Arguments:
    """The parameters of one program's function, and what is bound to them already.

    Raises:
        ProgramError: the function cannot be a program.
    """

    def __init__(self, func: Callable[..., object], program: str, bound: Mapping[str, object]) -> None:
        self._program = program
        self.bound = dict(bound)
        self.signature = _signature(func, program)
        self.parameters = tuple(self.signature.parameters.values())[1:]  # without the state

    def bound_with(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """All that is bound, with these over it.

        Raises:
            ProgramError: the program has no such parameter, and no run such an option.
        """
        arguments = self._spelled(arguments)
        for name in arguments:
            if not self._takes(name) and name not in RUN_NAMES | {"options"}:
                raise self._unknown(name)
        return {**self.bound, **arguments}

    def missing(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[str, ...]:
        """The parameters that have no default and were not given."""
        named = {parameter.name for parameter in self.parameters[: len(args)]} | set(kwargs) | set(self.bound)
        return tuple(
            parameter.name
            for parameter in self.parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in named
        )

    def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
        """Sort what was given into arguments of the program and options of the run."""
        named, options = dict(self.bound), _mapping(self.bound.get("options"))
        named.pop("options", None)
        options |= _mapping(kwargs.pop("options", None))
        # What is given by position overrides what was bound by name.
        for parameter in self.parameters[: len(args)]:
            named.pop(parameter.name, None)
        named |= self._spelled(kwargs)
        arguments = {name: value for name, value in named.items() if self._takes(name, is_option=name in RUN_NAMES)}
        for name, value in named.items():
            if name in arguments:
                continue
            if name not in RUN_NAMES:
                raise self._unknown(name)
            options[name] = value
        try:
            bound = self.signature.bind(None, *args, **arguments)
        except TypeError as error:
            remedy = ""
            if any(isinstance(value, State) for value in args):
                remedy = f"; a run makes a state of its own, and {self._program}(state, ...) goes on with one"
            raise ProgramError(f"program {self._program}{self.shown}: {error}{remedy}") from None
        return Call(bound.args[1:], bound.kwargs, *_run_options(options))

    def call_inside(
        self, state: State | ForkGroup, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[State, Call]:
        """A call that goes on with somebody's state: arguments of the program only, for options are of a run.

        Raises:
            ProgramError: an option is given, or bound; the state is a group of them.
        """
        if isinstance(state, ForkGroup):
            raise ProgramError(f"forks go on one by one: for fork in forks: {self._program}(fork, ...)")
        call = self.call(args, kwargs)
        if call != Call(call.args, call.kwargs, *_run_options({})):
            raise ProgramError(
                f"{self._program}(state, ...) goes on with the run of that state, and takes no options of its own; "
                "put them on its gens, or on that run"
            )
        return state, call

    def _takes(self, name: str, *, is_option: bool = False) -> bool:
        """Is it an argument of the program? One that takes **anything leaves options to the run."""
        for parameter in self.parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                if not is_option:
                    return True
            elif parameter.name == name and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                return True
        return False

    def _spelled(self, named: Mapping[str, object]) -> Mapping[str, object]:
        """The run's options by one name each, where the program has no parameter that either name may mean."""
        if _SPELLINGS[0] not in named or any(self._takes(name, is_option=True) for name in _SPELLINGS):
            return named
        return _by_one_name(named)

    def _unknown(self, name: str) -> ProgramError:
        known = [parameter.name for parameter in self.parameters]
        remedy = hint(name, RUN, [*known, *RUN_NAMES])
        state = next(iter(self.signature.parameters))
        if name == state:
            remedy = f"; the first parameter, {state!r}, is the state: def {self._program}(s, {state}, ...)"
        return ProgramError(
            f"program {self._program}{self.shown} has no parameter {name!r}, and it is no option of a run{remedy}"
        )

    @property
    def shown(self) -> str:
        return "(" + ", ".join(str(_unquoted(parameter)) for parameter in self.parameters) + ")"


def _unquoted(parameter: inspect.Parameter) -> inspect.Parameter:
    """As it was written also under `from __future__ import annotations`, which makes every type a text."""
    said = parameter.annotation
    return parameter.replace(annotation=_Bare(said)) if isinstance(said, str) else parameter


class _Bare(str):
    """A type's name that shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(func: Callable[..., object], name: str) -> inspect.Signature:
    if not callable(func) or isinstance(func, type):
        raise ProgramError(f"@function goes above a def, got {func!r}")
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise ProgramError(f"program {name} must be a def or an async def without yield; return the value instead")
    try:
        signature = inspect.signature(func)
    except ValueError:  # of some builtins nobody knows it
        raise ProgramError(f"@function goes above a def, got {func!r}") from None
    parameters = tuple(signature.parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in by_position:
        raise ProgramError(f"program {name}{signature} needs the state as its first parameter: def {name}(s, ...)")
    if (owner := parameters[0].name) in ("self", "cls"):
        raise ProgramError(
            f"program {name}{signature}: the first parameter is the state, not an object or a class; write "
            f"@staticmethod above @function, or make a program of the bound method: function({owner}.{name})"
        )
    if "options" in (parameter.name for parameter in parameters[1:]):
        raise ProgramError(f"program {name}: a parameter may not be called 'options', where a run's options go")
    for parameter in parameters[1:]:
        # FastAPI's Query and Body are Fields, too.
        if any(kind.__module__ == "pydantic.fields" for kind in type(parameter.default).__mro__):
            raise ProgramError(
                f"program {name}: the default of parameter {parameter.name!r} would be the Field itself; write "
                f"{parameter.name}: Annotated[TYPE, Field(...)] = VALUE"
            )
    return signature


def _run_options(
    options: Mapping[str, object],
) -> tuple[SamplingOptions, Host | None, bool, float | None, TemplateFunction | None, Session | None]:
    """Check the options of a run, one by one.

    Raises:
        ProgramError: an unknown name, a value of the wrong type, or a template of its own in a session.
        RequestError: a sampling option is out of its bounds.
    """
    for name in options:
        if name not in RUN_NAMES:
            raise ProgramError(f"a run has no option {name!r}{hint(name, RUN, RUN_NAMES)}")
    sampling = _sampling({name: value for name, value in options.items() if name in SAMPLING_NAMES})
    timeout = options.get("timeout")
    check_timeout(timeout)
    stream = options.get("stream", False)
    if not isinstance(stream, bool):
        raise ProgramError(f"stream must be True or False, got {stream!r}")
    template = template_function(options.get("chat_template"))
    host = options.get("backend")
    # isinstance takes 10 us to say no, and every run asks. Of the class: an engine that is asked for a name that it has
    # not looks for what was meant, in 70 us.
    session = host if hasattr(type(host), "store") and isinstance(host, Session) else None
    if session is not None:
        if template is not None:
            raise ProgramError("the turns of a session stand in the model's own template; leave out chat_template")
        host = session.endpoint
    return sampling, cast("Host | None", host), stream, cast("float | None", timeout), template, session


def _sampling(said: dict[str, object]) -> SamplingOptions:
    if not said:
        return _NOTHING_SAID
    if "stop_regex" in said:
        said["stop_regex"] = stop_text(said["stop_regex"])  # type: ignore[arg-type]  # checked two lines below
    sampling = SamplingOptions(**said)  # type: ignore[arg-type]  # names are fields; values are checked on the next line
    check_options(sampling)
    return sampling


_NOTHING_SAID: Final = SamplingOptions()


def _mapping(options: object) -> dict[str, object]:
    if options is None:
        return {}
    if isinstance(options, SamplingOptions):
        return {name: value for name in SAMPLING_NAMES if (value := getattr(options, name)) is not None}
    if isinstance(options, Mapping):
        return dict(_by_one_name(options))
    raise ProgramError(f"options must be a mapping of option names to values, got {options!r}")


def _by_one_name(options: Mapping[str, object]) -> Mapping[str, object]:
    """`max_tokens` as `max_new_tokens`: a gen takes both, and so does a run."""
    short, whole = _SPELLINGS
    if short not in options:
        return options
    if options.get(short) is not None and options.get(whole) is not None:
        raise ProgramError(f"{short} and {whole} are the same option; give one of them")
    value = options.get(whole) if options[short] is None else options[short]
    return {**{name: said for name, said in options.items() if name != short}, whole: value}


def check_rows(rows: object, program: str) -> None:
    """Raises ProgramError: they are no rows, whatever stands in them."""
    if not isinstance(rows, str | bytes | Mapping) and (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
        if not hasattr(rows, "iterrows"):
            return
        remedy = "write rows.to_dict('records')"  # a table of pandas, which iterates over the names of its columns
    else:
        remedy = (
            f"write [{rows!r}]" if isinstance(rows, Mapping) else "each is a mapping of arguments or a tuple of them"
        )
    raise ProgramError(f"a batch of program {program} takes a list of rows, got a {type(rows).__name__}; {remedy}")


def batch_options(given: dict[str, object], batch: Callable[..., object]) -> dict[str, object]:
    """The options of every row's run, checked once instead of in every row. `batch` has options of its own."""
    if "stream" in given:
        raise ProgramError("a batch cannot stream; iterate over it to get states as they finish")
    options = {**_mapping(given.pop("options", None)), **_by_one_name(given)}
    for name in options:
        if name not in RUN_NAMES:
            general = (
                "; arguments of the program stand in the rows, or are bound with bind(); how many rows run at once is "
                "num_threads of run_batch and concurrency of arun_batch"
            )
            known = [*RUN_NAMES, *inspect.signature(batch).parameters]
            raise ProgramError(f"a batch has no option {name!r}{hint(name, RUN, known, 0.8) or general}")
    session = _run_options(options)[-1]
    if session is not None:
        raise ProgramError(f"the rows of a batch cannot all go on in {session!r}; run one after the other in it")
    return options


def row_arguments(row: Row, program: str) -> tuple[tuple[object, ...], dict[str, object]]:
    """Raises ProgramError: it is neither, or has options for all rows."""
    if isinstance(row, Mapping):
        if "options" in row:
            raise ProgramError("options are of the whole batch; give a row's own by their names, beside its arguments")
        return (), dict(row)
    if isinstance(row, tuple):
        return row, {}
    raise ProgramError(f"a row of program {program} is a mapping of arguments or a tuple of them, got {_shown(row)}")


def _shown(row: object) -> str:
    return f"{row!r}; write ({row!r},)" if isinstance(row, str | int | float) else repr(row)
