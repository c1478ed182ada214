"""The workers: their state table, slots, liveness and GPUs, and the choice of a worker.

The package is pure; `processes` starts and ends the processes.
"""
