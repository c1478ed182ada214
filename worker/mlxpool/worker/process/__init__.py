"""The worker's main thread: its link, its heartbeats, and the table of its requests.

Imports no MLX, and never waits for the compute thread.
"""
