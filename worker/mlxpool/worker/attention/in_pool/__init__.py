"""Rows and prefixes in blocks of one pool, for CUDA, and the compiled passes over rows."""
