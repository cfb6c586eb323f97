"""Reads timelines written as CSV: a first line that says so, then a row for each GPU operation.

# timeline 1
gpu,kind,start_ns,end_ns,name
0,copy_h2d,0,40000,batch
0,kernel,52000,90000,gemm
"""

import csv
import gzip

import numpy as np

from gputrace.extend import Device, Events, InputError, Kind, MemoryTrace, Names, Process, Reader

MARK = b"# timeline 1\n"
COLUMNS = ("start", "end", "kind", "name", "device", "stream")


def recognises(candidate):
    return candidate.content.startswith(MARK)


def read(candidate):
    names, rows = Names(), []
    opened = gzip.open if candidate.head != candidate.content else open
    with opened(candidate.path, "rt", encoding="utf-8") as file:
        file.readline()
        for number, row in enumerate(csv.DictReader(file), 3):
            try:
                kind = Kind[row["kind"].upper()]
                gpu, start, end = (int(row[name]) for name in ("gpu", "start_ns", "end_ns"))
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(candidate.path, f"line {number} is broken ({error})") from None
            rows.append((start, end, kind, names.number(row["name"]), gpu, 0))
    columns = np.array(rows, np.int64).reshape(-1, len(COLUMNS)).T
    events = Events(dict(zip(COLUMNS, columns, strict=True)))
    devices = [Device(0, gpu, gpu) for gpu in {row[4] for row in rows}]
    return MemoryTrace(candidate.path, "timeline", [events], names.texts, [Process(0)], devices)


READER = Reader("CSV timelines", recognises, read, decodes=True)
