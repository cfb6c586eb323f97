"""The links between the GPUs of a run: what they are, what went over them, and how fast."""

from gputrace.analyzers.links.measure import Links, measure_links

__all__ = ["Links", "measure_links"]
