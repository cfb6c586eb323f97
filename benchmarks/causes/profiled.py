"""Runs a program under torch.profiler: ``python profiled.py FOLDER PROGRAM``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from torch.profiler import profile

folder, program = sys.argv[1:3]
sys.argv = [program]
sys.path.insert(0, str(Path(program).parent))
with profile(record_shapes=True, with_stack=True) as profiler:
    runpy.run_path(program, run_name="__main__")
name = f"rank{os.environ.get('RANK', '0')}.pt.trace.json.gz"
profiler.export_chrome_trace(str(Path(folder, name)))
