"""A snapshot of the pool, and its renderings: stats, ps, top, status page, Prometheus.

This package only reads: it never changes the core.
"""
