"""Running what is recorded so that it behaves as if nobody watched.

``child`` runs the program itself, ``supervised`` runs it below another tool that would disturb it,
with ``supervisor`` between the two; ``tool`` asks such a tool what it knows and said.
"""
