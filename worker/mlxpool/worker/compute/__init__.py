"""The one thread that touches MLX, and the messages between it and the main thread.

Imports no ZeroMQ.
"""
