"""The worker's main thread (link, runs, heartbeats) and its preparer thread.

Imports no MLX, and never waits for the compute thread.
"""
