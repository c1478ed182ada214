"""The one thread that touches MLX: admits sequences, schedules steps, runs them, delivers results.

Imports no ZeroMQ; it talks to the main thread through the messages in messages.py.
"""
