"""Operating-system functions: CPU threads, kept files, stack dumps, parent death.

Imports no other package of the worker.
"""
