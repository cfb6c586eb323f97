"""Collectors: each turns a program under way into a trace file.

A collector runs beside or inside what it records and leaves a file behind; readers take it from
there. It may use the writer of traces and knows nothing above them: no analyzer, no view.
"""
