"""The language: programs, states and values. Knows itself and `niwaki.runtime.api`, never the engine."""
