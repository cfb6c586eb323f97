"""Terminal browser of traces, and the screen of a recording under way."""
