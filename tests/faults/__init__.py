"""Faults that are injected into recordings, and what must hold: `python -m tests.faults`."""
