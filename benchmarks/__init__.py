"""Benchmarks of gputrace: `python -m benchmarks help` lists them, docs/benchmarks.md explains."""
