"""The only thread that uses MLX: it admits, schedules and runs steps.

It imports no ZeroMQ and exchanges the messages in messages.py with the main thread.
"""
