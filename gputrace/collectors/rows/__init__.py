"""What was recorded as rows of the trace file's tables; the backends share what writes them.

Of one process: ``processes`` (who it was), ``activity`` (what the embedded collector saw, with
``nvtx``), ``host`` (what the hooks saw). Of a machine: ``cards``, ``nvml``. Of the recording:
``session``, ``losses``. ``clock`` puts moments and ids into one form, ``names`` and ``overheads``
say what nsys calls things.
"""
