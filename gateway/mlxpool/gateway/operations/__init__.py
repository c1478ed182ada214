"""The record of each request, metrics and drain of the gateway.

These modules do not depend on routes or the pool.
"""
