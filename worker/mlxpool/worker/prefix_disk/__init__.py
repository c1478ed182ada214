"""The prefix cache on disk: checksummed records in append-only segments.

Workers of one host share the folder. Imports no MLX: contents are NumPy arrays of bytes.
"""
