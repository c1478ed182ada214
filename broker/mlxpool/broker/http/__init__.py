"""Serves metrics, health and the status page over HTTP, on its own threads.

It reads snapshots and never touches the core.
"""
