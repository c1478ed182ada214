"""The worker: one process that holds one model and computes the broker's requests.

Clients talk only to the broker, never to a worker.
"""
