"""The worker's main thread: link to the broker, heartbeats, and table of requests.

Imports no MLX, and never waits for the compute thread.
"""
