"""A snapshot of the pool, and its forms: stats, ps, top, status page, Prometheus.

This package only reads: it never changes the core.
"""
