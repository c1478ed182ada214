"""The workers: state table, slots, liveness, their GPUs, and which of them is given a request.

Pure; processes are started and ended by `processes`.
"""
