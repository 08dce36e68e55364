"""The loop on a thread of its own, and the branches that programs have of it."""
