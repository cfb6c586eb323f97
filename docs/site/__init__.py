"""Parts of the pages that are made from the code, as Markdown; see `conf.py`."""
