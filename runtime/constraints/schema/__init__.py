"""JSON schemas, rewritten exactly into the part of JSON Schema that the engine enforces. Knows no tokens."""

from niwaki.runtime.constraints.schema.normal import NormalSchema, normalise
from niwaki.runtime.constraints.schema.shortest import shortest_text

__all__ = ["NormalSchema", "normalise", "shortest_text"]
