"""Finds models on the disk and has their files read by short-lived processes of the worker's code.

What they say reaches the core as events.
"""
