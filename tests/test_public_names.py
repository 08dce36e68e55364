"""The public face: exactly these names, each there, each documented, and none loaded before it is used."""

from __future__ import annotations

import gc
import importlib
import inspect
from types import ModuleType

import pytest

import niwaki

LANGUAGE = set(
    "function State gen gen_int gen_float gen_bool gen_string select separate_reasoning system user assistant "
    "system_begin system_end user_begin user_end assistant_begin assistant_end image".split()
)
METHODS = {"token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"}
BACKENDS = set(
    "Engine Runtime RuntimeEndpoint OpenAI ScriptedBackend set_default_backend flush_cache get_server_info".split()
)
ERRORS = set(
    "NiwakiError ConfigError ModelError RequestError ConstraintError CapacityError GenerationError EngineStopped "
    "Cancelled TimedOut UnsupportedByBackend ProgramError UnknownVariable".split()
)


def test_the_public_names_are_exactly_these() -> None:
    assert set(niwaki.__all__) == LANGUAGE | METHODS | BACKENDS | ERRORS | {"__version__"}
    assert len(niwaki.__all__) == len(set(niwaki.__all__))


@pytest.mark.parametrize("name", niwaki.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(niwaki, name) is not None
    assert name in dir(niwaki)


def test_every_error_is_a_niwaki_error() -> None:
    for name in ERRORS:
        assert issubclass(getattr(niwaki, name), niwaki.NiwakiError)


def test_every_error_of_the_tree_is_public() -> None:
    from niwaki.runtime import api

    tree = {name for name, value in vars(api).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert tree == ERRORS


def test_public_classes_and_functions_say_what_they_do() -> None:
    begins_and_ends = {name for name in LANGUAGE if name.endswith(("_begin", "_end"))}
    for name in (LANGUAGE | BACKENDS | ERRORS) - begins_and_ends:
        assert inspect.getdoc(getattr(niwaki, name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'niwaki' has no attribute 'gen_json'"):
        getattr(niwaki, "gen_json")  # noqa: B009  # as a type checker would refuse the plain form


def test_a_name_is_the_same_object_every_time() -> None:
    assert niwaki.gen is niwaki.gen
    assert niwaki.gen.__module__ == "niwaki.lang.expressions"


def test_python_looks_for_no_cycles_while_a_name_loads_and_for_all_of_them_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def interrupted(name: str) -> ModuleType:
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert gc.isenabled()
    for is_enabled in (True, False):
        if not is_enabled:
            gc.disable()
        try:
            with pytest.raises(KeyboardInterrupt):
                niwaki.__getattr__("Engine")
            assert gc.isenabled() is is_enabled
        finally:
            gc.enable()
    assert seen == [False, False]
