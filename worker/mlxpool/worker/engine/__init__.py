"""Engines: they compute prefill chunks and decode steps and account for memory.

ModelEngine runs our own model code, MlxLmEngine that of mlx-lm, CountingEngine no model at all.
"""
