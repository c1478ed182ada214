"""The store of jobs, and the single thread that reads and writes the store.

The store makes no decisions about jobs: `operations.py` has the operations on the store,
`records.py` their results.
"""
