"""The operating system: CPU threads, priorities, stack dumps, parent death.

Imports no other package of the worker.
"""
