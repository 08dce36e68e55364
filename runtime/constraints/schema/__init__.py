"""JSON schemas, rewritten exactly into the part of JSON Schema that the engine enforces. Knows no tokens."""

from niwaki.runtime.constraints.schema.normal import NormalSchema, normalise

__all__ = ["NormalSchema", "normalise"]
