"""The workers of a model: state table, slots, liveness, placement and eviction.

Pure; processes are started and ended by `processes`.
"""
