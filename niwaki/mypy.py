"""A plugin for mypy: arguments of programs are checked where they are run, beside the options of a run.

No type of Python says "the parameters of this function, and these options", so without the plugin a call may give
anything. In pyproject.toml:

    [tool.mypy]
    plugins = ["niwaki.mypy"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from mypy.checker import TypeChecker
from mypy.nodes import ArgKind, CallExpr, MemberExpr, NameExpr, TypeInfo
from mypy.plugin import MethodContext, Plugin
from mypy.types import CallableType, Instance, Parameters, Type, get_proper_type

PROGRAMS: Final = ("niwaki.lang.program.Program", "niwaki.lang.decorator.AsyncProgram")
STATES: Final = ("niwaki.lang.state.State", "niwaki.lang.state.ForkGroup")
OPTIONS: Final = "niwaki.lang.arguments", "RunOptions"
RUNS: Final = ("run", "arun", "stream", "__call__")


class ProgramPlugin(Plugin):
    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        owner, _, method = fullname.rpartition(".")
        if owner not in PROGRAMS:
            return None
        if method in RUNS:
            return checked_run
        return bound if method == "bind" else None


def checked_run(context: MethodContext) -> Type:
    """Of a run: its arguments are the program's, or options of a run."""
    call, checker, parameters = context.context, context.api, _parameters(context.type)
    if parameters is None or not isinstance(checker, TypeChecker) or not isinstance(call, CallExpr):
        return context.default_return_type
    if ArgKind.ARG_STAR in call.arg_kinds or ArgKind.ARG_STAR2 in call.arg_kinds:  # who knows what is in them
        return context.default_return_type
    goes_on = _goes_on(context)  # with a state, and takes no options then
    skipped = 1 if goes_on else 0
    types, kinds, names = list(parameters.arg_types), list(parameters.arg_kinds), list(parameters.arg_names)
    own = frozenset(names)
    for name, kind in {} if goes_on else _options(checker):
        if name not in own:
            at = len(kinds) - (ArgKind.ARG_STAR2 in kinds)  # **anything comes last
            types.insert(at, kind)
            kinds.insert(at, ArgKind.ARG_NAMED_OPT)
            names.insert(at, name)
    fallback = checker.named_type("builtins.function")
    callee = CallableType(types, kinds, names, context.default_return_type, fallback, name=_name(call))
    checker.expr_checker.check_call(
        callee, call.args[skipped:], call.arg_kinds[skipped:], call, call.arg_names[skipped:]
    )
    return context.default_return_type


def bound(context: MethodContext) -> Type:
    """Of `bind`: what has a default now may be left out."""
    call, program, parameters = context.context, get_proper_type(context.default_return_type), _parameters(context.type)
    if parameters is None or not isinstance(call, CallExpr) or not isinstance(program, Instance):
        return context.default_return_type
    optional = {ArgKind.ARG_POS: ArgKind.ARG_OPT, ArgKind.ARG_NAMED: ArgKind.ARG_NAMED_OPT}
    kinds = [
        optional.get(kind, kind) if name in call.arg_names else kind
        for name, kind in zip(parameters.arg_names, parameters.arg_kinds, strict=True)
    ]
    return program.copy_modified(args=[program.args[0], parameters.copy_modified(arg_kinds=kinds)])


def _parameters(program: Type) -> Parameters | None:
    """Those of the function, without the state; None where nobody knows them."""
    program = get_proper_type(program)
    if not isinstance(program, Instance) or len(program.args) != 2:
        return None
    parameters = get_proper_type(program.args[1])
    return parameters if isinstance(parameters, Parameters) and not parameters.is_ellipsis_args else None


def _goes_on(context: MethodContext) -> bool:
    """Whether the first argument is a state, or forks."""
    if not context.arg_types or not context.arg_types[0]:
        return False
    first = get_proper_type(context.arg_types[0][0])
    return isinstance(first, Instance) and first.type.fullname in STATES


def _options(checker: TypeChecker) -> Iterable[tuple[str, Type]]:
    module, name = OPTIONS
    found = checker.modules[module].names[name].node
    assert isinstance(found, TypeInfo)
    assert found.typeddict_type is not None
    return found.typeddict_type.items.items()


def _name(call: CallExpr) -> str:
    """As the call names it, for messages."""
    match call.callee:
        case MemberExpr(name=name, expr=NameExpr(name=program)):
            return f"{program}.{name}"
        case MemberExpr(name=name) | NameExpr(name=name):
            return name
    return "a program"


def plugin(version: str) -> type[Plugin]:
    """What mypy asks for."""
    return ProgramPlugin
