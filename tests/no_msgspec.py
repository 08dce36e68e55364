"""Stands in for msgspec on a machine that lacks it: structs as dataclasses, as right and slower to make.

Imported for that, before the runtime. Where msgspec is installed this does nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import dataclass_transform


@dataclass_transform()
class Struct:
    def __init_subclass__(cls, **options: bool) -> None:
        """The options are of speed (`gc`) or of the wire (`array_like`), or forbid what nobody does (`frozen`)."""
        if unknown := options.keys() - {"frozen", "gc", "eq", "array_like"}:
            raise TypeError(f"no stand-in for the options {sorted(unknown)} of a struct")
        dataclass(cls, eq=options.get("eq", True))


try:
    import msgspec  # noqa: F401
except ModuleNotFoundError:
    stand_in, structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
    vars(structs).update(replace=replace)
    vars(stand_in).update(Struct=Struct, structs=structs)
    sys.modules.update({"msgspec": stand_in, "msgspec.structs": structs})
