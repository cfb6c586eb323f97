"""The browser: a timeline of the GPUs in a terminal, and the gaps between the batches.

Imports Textual, which takes half a second: only `gputrace.cli.browse` imports it, and late.
"""
