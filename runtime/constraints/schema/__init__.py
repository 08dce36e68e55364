"""JSON schemas, rewritten exactly into the part of JSON Schema that the engine enforces. Knows no tokens."""

from niwaki.runtime.constraints.schema.document import TookTooLong
from niwaki.runtime.constraints.schema.normal import NormalSchema, normalise
from niwaki.runtime.constraints.schema.shortest import array_ends, closings, examples, shortest_text, text_with_witness

__all__ = [
    "NormalSchema", "TookTooLong", "array_ends", "closings", "examples", "normalise", "shortest_text",
    "text_with_witness",
]  # fmt: skip
