"""Finds, checks and loads a model's files, from `path` to weights in memory.

Everything but load.py works without MLX.
"""
