"""The engine's loop: who waits and who runs, what the next step computes, what its tokens mean. No threads."""
