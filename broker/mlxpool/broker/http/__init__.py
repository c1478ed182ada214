"""The HTTP server for metrics and the status page, on a thread of its own.

It reads snapshots and never touches the core.
"""
