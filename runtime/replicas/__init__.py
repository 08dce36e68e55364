"""Engines on several machines, as replicas on Ray Serve: each request goes to the one that has most of its prefix."""
