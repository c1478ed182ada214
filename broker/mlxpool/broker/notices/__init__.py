"""Posts signed notices of ended jobs and batches to allowed hosts.

A thread of its own does that: names, connections and slow servers never hold up the broker's loop.
"""
