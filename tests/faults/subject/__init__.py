"""The program that faults are injected into.

`python -m tests.faults.subject BEHAVIOUR SECONDS [WORD…]`

It launches kernels and marks steps, each some hundred times a second, does one thing besides that
programs do and a recorder may stumble over, and says no more than what is the same each time.
What it did and when is in the ledger that LEDGER names (a process of its own adds to the name).
"""
