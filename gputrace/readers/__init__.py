"""Readers of trace files, one module per format."""
