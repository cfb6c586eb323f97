"""The recorders of one job: which task this one is, what its output is called, who shares a folder.

``job`` reads launchers' variables, ``naming`` makes names of ``-o``, ``team`` has the recorders of
one machine write one trace.
"""
