"""Code that every process of a pool shares: protocol, transport, settings, errors and options.

Imports no other package of mlxpool.
"""
