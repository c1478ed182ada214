"""The main thread of a worker: link to the broker, runs, heartbeats; and the preparer thread.

Imports no MLX, and never waits for the compute thread.
"""
