"""Compares routing policies: simulated workers and prompts with common beginnings.

`mlxpool bench routing` runs it. The broker's policy is in mlxpool.broker.routing.
"""
