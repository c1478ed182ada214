"""The worker: one process that holds one model and computes the broker's requests.

It never sees a client.
"""
