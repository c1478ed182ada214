"""The store of jobs, and the one thread that reads and writes it.

It decides nothing: `operations.py` has the operations on the store, `records.py` their results.
"""
