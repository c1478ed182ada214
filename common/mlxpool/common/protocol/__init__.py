"""MLXP/1: the messages between clients, broker and workers, and their bytes.

Nothing here does I/O.
"""
