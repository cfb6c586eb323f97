"""Logs of nvidia-smi, which say what the GPUs did while something else recorded a trace.

`query` reads what ``--query-gpu`` prints as CSV and `dmon` what ``dmon`` prints, both into the rows
of `log`; `apart` tells the GPUs of the rows apart, and `join` lays the log over a trace.
"""
