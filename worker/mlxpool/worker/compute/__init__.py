"""The compute thread, the only thread that uses MLX: it admits, schedules and runs steps.

This code does not use ZeroMQ; the thread exchanges the messages in messages.py with the main
thread.
"""
