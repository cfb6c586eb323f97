"""Collectors, which run beside or inside a program and make a trace file of it."""
