"""One sequence: its tokens, when its text ends, what may be guessed of it, and how its answer is told."""
