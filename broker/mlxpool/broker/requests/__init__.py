"""A request: its record, state table, position in the queue and output buffer.

Pure.
"""
