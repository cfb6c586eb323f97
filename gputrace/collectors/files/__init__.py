"""What recorded processes leave behind: files of tagged chunks, read as numpy records.

``chunks`` is the container, ``spool`` what the C library in a process writes into it,
``host_events`` what the hooks in a Python process do.
"""
