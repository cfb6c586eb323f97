"""Ranks that the others wait for: what each loses by the others (`lateness`, `pace`), who it is."""
