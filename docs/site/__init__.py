"""What the pages of the site show that is made from the code, as Markdown; see `conf.py`."""
