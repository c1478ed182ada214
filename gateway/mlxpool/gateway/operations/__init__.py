"""The record of each request, metrics and drain of the gateway.

None of it knows routes or the pool.
"""
