"""One request: its record, its state table, its place in the queue and its output buffer.

Pure.
"""
