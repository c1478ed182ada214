"""The one thread that touches MLX: admits, schedules and runs steps.

Imports no ZeroMQ; it talks to the main thread through the messages in messages.py.
"""
