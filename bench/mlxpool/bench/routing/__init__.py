"""Compares routing policies: simulated workers under loads whose prompts share beginnings.

`mlxpool bench routing` runs it. The broker's policy is that of mlxpool.broker.routing.
"""
