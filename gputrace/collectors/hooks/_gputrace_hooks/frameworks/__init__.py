"""Hooks by framework: one file each, named after the framework's package.

A file has a table, ``PATCHES``: modules, each with a function that gets the module once the program
has imported it. Its docstring says which versions it was tried with, what it records, and its cost.
``wrappers`` has what most need: `iterators`, `marks_steps`, `phases`.
"""
