"""The workers: state table, slots, liveness, and which of them is given a request.

Pure; processes are started and ended by `processes`.
"""
