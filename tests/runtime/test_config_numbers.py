"""A number among the options that is none, or no number that counts, is refused at the door, by the option's name."""

from __future__ import annotations

import math
from dataclasses import Field, fields

import pytest

from niwaki.runtime.api import ConfigError
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.keys import KeyLimits

NUMBERS = ("int", "float", "int | None", "float | int | None")  # as they are annotated
NONSENSE = (math.nan, math.inf, -math.inf, True, False, "5", "", [5], None)


def numeric(config: type) -> list[Field[object]]:
    return [field for field in fields(config) if field.type in NUMBERS]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param(config, field, id=f"{config.__name__}.{field.name}")
        for config in (EngineConfig, ServerConfig, ReplicaConfig, KeyLimits)
        for field in numeric(config)
    ],
)
def test_an_option_that_is_no_number_is_refused_by_its_name(config: type, field: Field[object]) -> None:
    for value in NONSENSE:
        if value is None and "None" in str(field.type):
            continue
        with pytest.raises(ConfigError, match=rf"^{field.name} "):
            config(**{field.name: value})


def test_all_numbers_of_the_options_are_looked_at() -> None:
    counts = [len(numeric(config)) for config in (EngineConfig, ServerConfig, ReplicaConfig, KeyLimits)]
    assert counts == [10, 9, 7, 3]
