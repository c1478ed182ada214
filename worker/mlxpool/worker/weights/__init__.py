"""Finds, checks and loads the files of a model: from a `path` setting to weights in memory.

Everything but load.py works without MLX.
"""
