"""One request: its record, state table, place in the queue and output buffer.

Pure.
"""
