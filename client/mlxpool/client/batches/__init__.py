"""Batches: files of requests, one per line, which the pool computes without the client.

These modules do not wait. They yield steps, such as a call or a pause, which the packages `sync`
and `aio` perform.
"""
