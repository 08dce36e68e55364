"""niwaki: programs for language models, on a runtime of their own. Names only; each loads where it is first used."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Name -> the module that it comes from. Importing niwaki imports none of them.
_HOMES = {
    "niwaki.lang.decorator": ("function",),
    "niwaki.lang.expressions": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "gen",
        "gen_bool",
        "gen_float",
        "gen_int",
        "gen_string",
        "image",
        "select",
        "separate_reasoning",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
    ),
    "niwaki.runtime.api.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "niwaki.lang.backends": ("flush_cache", "get_server_info", "set_default_backend"),
    "niwaki.lang.openai_backend": ("OpenAI",),
    "niwaki.lang.remote": ("RuntimeEndpoint",),
    "niwaki.lang.scripted": ("ScriptedBackend",),
    "niwaki.lang.state": ("State",),
    "niwaki.runtime.engine": ("Engine", "Runtime"),
    "niwaki.runtime.api": (
        "Cancelled",
        "CapacityError",
        "ConfigError",
        "ConstraintError",
        "EngineStopped",
        "GenerationError",
        "ModelError",
        "NiwakiError",
        "ProgramError",
        "RequestError",
        "TimedOut",
        "UnknownVariable",
        "UnsupportedByBackend",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from niwaki.lang.backends import flush_cache, get_server_info, set_default_backend
    from niwaki.lang.decorator import function
    from niwaki.lang.expressions import (
        assistant,
        assistant_begin,
        assistant_end,
        gen,
        gen_bool,
        gen_float,
        gen_int,
        gen_string,
        image,
        select,
        separate_reasoning,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
    )
    from niwaki.lang.openai_backend import OpenAI
    from niwaki.lang.remote import RuntimeEndpoint
    from niwaki.lang.scripted import ScriptedBackend
    from niwaki.lang.state import State
    from niwaki.runtime.api import (
        Cancelled,
        CapacityError,
        ConfigError,
        ConstraintError,
        EngineStopped,
        GenerationError,
        ModelError,
        NiwakiError,
        ProgramError,
        RequestError,
        TimedOut,
        UnknownVariable,
        UnsupportedByBackend,
    )
    from niwaki.runtime.api.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from niwaki.runtime.engine import Engine, Runtime

__all__ = [
    "Cancelled",
    "CapacityError",
    "ConfigError",
    "ConstraintError",
    "Engine",
    "EngineStopped",
    "GenerationError",
    "ModelError",
    "NiwakiError",
    "OpenAI",
    "ProgramError",
    "RequestError",
    "Runtime",
    "RuntimeEndpoint",
    "ScriptedBackend",
    "State",
    "TimedOut",
    "UnknownVariable",
    "UnsupportedByBackend",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_bool",
    "gen_float",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


if not TYPE_CHECKING:  # a type checker is to see that there is no such name

    def __getattr__(name: str) -> object:
        module = _HOME_OF.get(name)
        if module is None:
            remedy = "" if name.startswith("_") else _remedy(name)
            raise AttributeError(f"module 'niwaki' has no attribute {name!r}{remedy}")
        # To look for cycles among what torch and Numba make while they load, again and again, took 0.4 s of 2.6 up to
        # the first token, and found none.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            value: object = getattr(importlib.import_module(module), name)
        finally:
            if was_enabled:
                gc.enable()
        globals()[name] = value  # found without this function from now on
        return value


def _remedy(name: str) -> str:
    from niwaki.lang.foreign_names import MODULE  # heavy for an import that nobody wrote wrongly
    from niwaki.runtime.api.names import hint

    return hint(name, MODULE, __all__, 0.75)


def __dir__() -> list[str]:
    return sorted(__all__)
