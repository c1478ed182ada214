"""What a worker asks of the operating system: CPU threads, priorities, stack dumps, parent death.

Imports no other package of the worker.
"""
