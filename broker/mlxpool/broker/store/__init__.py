"""The store of jobs, and the single thread that reads and writes it.

The store decides nothing: `operations.py` has the operations, `records.py` their results.
"""
