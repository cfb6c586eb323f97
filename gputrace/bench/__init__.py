"""Studies: a matrix of training runs, each of them once, and what came of them.

``study`` reads a study file, ``plan`` makes runs of it, ``frameworks`` finds what can run them,
``runner`` runs them one after another, ``database`` keeps what came of each.
"""
