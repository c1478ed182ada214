"""One request: its checked message, its state table, its place in the queue and its unsent output.

Pure.
"""
