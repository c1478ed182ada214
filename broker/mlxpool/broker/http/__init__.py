"""The HTTP server of metrics, health and the status page, on its own threads.

It reads snapshots and never touches the core.
"""
