"""What each GPU of a run had to do, side by side, and what one has that the others have not."""

from gputrace.analyzers.balance.loads import compare_loads, most_memory

__all__ = ["compare_loads", "most_memory"]
