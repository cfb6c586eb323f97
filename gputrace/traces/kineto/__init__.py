"""Traces of PyTorch's profiler (Kineto): JSON in the form that Chrome's trace viewer reads.

text       the file's text, unpacked, a block at a time
document   the list of events in it, in parts that are whole, and what stands around the list
decimals   times as the text has them, to the nanosecond
decode     events and properties as JSON decodes them
rows       events to the event columns
reader     all of it as a trace
"""
