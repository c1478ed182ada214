"""Engines: they compute prefill chunks and decode steps and account for memory.

ModelEngine runs our own model code, CountingEngine no model at all; that of mlx-lm is in mlx_lm/.
"""
