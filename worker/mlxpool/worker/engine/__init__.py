"""Engines: they compute prefill chunks and decode steps, and account for memory.

ModelEngine runs our own model code. CountingEngine computes a formula for tests. The engine of
encoder models is in encoding/, the engine of mlx-lm in mlx_lm/.
"""
