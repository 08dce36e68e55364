"""An engine in a process of its own: what its host and those who ask say to each other, and who watches it."""
