"""The language: programs, states and values. Knows the runtime's contract and what draws, never the engine."""
