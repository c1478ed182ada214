"""Finds, checks and loads the files of a model, given by the setting `path`.

Only load.py, cut_reads.py, device_reads.py and gguf/reads.py need MLX.
"""
