"""Finds, checks and loads a model's files, from the setting `path` to weights in memory.

Only load.py, cut_reads.py, device_reads.py and gguf/reads.py need MLX.
"""
