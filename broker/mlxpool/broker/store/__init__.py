"""The store of jobs, and the one thread that reads and writes it.

It decides nothing: `operations.py` says what can be asked, `records.py` what is answered.
"""
