"""Batches: files of requests, one per line, which the pool computes without the client.

These modules do not wait: they make steps, and the packages `sync` and `aio` perform the steps.
"""
