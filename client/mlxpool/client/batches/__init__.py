"""Batches: files of lines that the pool works off by itself.

What is here waits for nothing: `sync` and `aio` perform its steps.
"""
