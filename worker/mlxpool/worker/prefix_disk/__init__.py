"""The disk tier of the prefix cache: checksummed records in append-only segments of a folder.

Workers of one host share the folder. Imports no MLX: contents are NumPy arrays of bytes.
"""
