"""Batches: files of lines, which the pool computes without the client.

These modules do not wait: they make steps, which `sync` and `aio` perform.
"""
