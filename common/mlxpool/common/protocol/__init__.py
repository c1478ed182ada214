"""MLXP/1: the messages between clients, broker and workers, and the bytes that they travel as.

Nothing here does I/O.
"""
