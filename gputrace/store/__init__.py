"""Storage of traces: SQLite access, writer, merge, slice, redaction, cache, spill file."""
