"""The gateway's operation: the record of each request, metrics, connections and drain.

These modules do not depend on routes or the pool.
"""
