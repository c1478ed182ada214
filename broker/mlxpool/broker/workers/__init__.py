"""The workers: state table, slots, liveness, GPUs, and the choice for a request.

Pure; processes are started and ended by `processes`.
"""
