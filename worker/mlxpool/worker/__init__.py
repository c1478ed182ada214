"""The worker: one process that holds one model and computes what the broker sends it.

It never sees a client.
"""
