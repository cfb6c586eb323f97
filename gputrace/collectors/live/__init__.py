"""A recording under way: what its processes have just written, read at a bounded cost.

``tail`` reads what files gained, ``recent`` keeps the last seconds of it, ``following`` is all of
a recording's folder, and makes a small trace of its last moments.
"""
