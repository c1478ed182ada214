"""Engines: compute prefill chunks and decode steps, and account for memory.

ModelEngine runs our own model code, CountingEngine no model at all. The engine of encoder models
is in encoding/, the engine of mlx-lm in mlx_lm/.
"""
