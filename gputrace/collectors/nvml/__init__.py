"""The GPUs' clocks, power, use and links, asked of NVML while a program is recorded.

``sampler`` runs a process that asks at a steady beat (``sampling``); ``cards`` and ``topology`` are
what it asks, ``log`` reads what it wrote.
"""
