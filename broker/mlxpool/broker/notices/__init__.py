"""Posts notices of ended jobs and batches over HTTP, signed, to hosts that the settings allow.

A thread of its own does that: names, connections and slow servers never hold up the broker's loop.
"""
