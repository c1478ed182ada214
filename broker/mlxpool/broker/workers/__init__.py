"""The workers: their state table, slots, liveness and GPUs, and the choice of a worker.

Pure; `processes` starts and ends the processes.
"""
