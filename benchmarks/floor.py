"""The least that reading a trace can cost: one pass of SQLite's own C code over the two tables.

A script that stands alone; prints the rows of each table and the seconds inside, as JSON.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time

TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME")


def main(path: str) -> None:
    began = time.perf_counter()
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    sql = 'SELECT count(*), total(start), total("end") FROM '
    rows = [connection.execute(sql + table).fetchone()[0] for table in TABLES]
    connection.close()
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(sys.argv[1])
