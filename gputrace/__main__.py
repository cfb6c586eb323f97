"""``python -m gputrace`` is the command ``gputrace``."""

from gputrace.cli import main

if __name__ == "__main__":
    main()
