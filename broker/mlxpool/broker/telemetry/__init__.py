"""One snapshot of the pool, and what renders it: stats, ps, top, the status page, Prometheus.

It only reads: nothing here changes the core.
"""
