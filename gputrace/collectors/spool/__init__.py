"""Files of recorded processes."""
