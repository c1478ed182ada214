"""One snapshot of the pool, rendered as stats, ps, top, status page, Prometheus.

It only reads: nothing here changes the core.
"""
