"""Layouts of keys and values in memory, and how a step attends to them.

One layout serves one engine.
"""
