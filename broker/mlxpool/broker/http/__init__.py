"""The HTTP server for metrics, health and the status page, on threads of its own.

It reads snapshots and never touches the core.
"""
