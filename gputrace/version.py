"""The version of gputrace."""

__version__ = "0.1.0"
