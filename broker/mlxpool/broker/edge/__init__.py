"""The broker's process: one loop on one thread around the pure core.

Messages become events for the core, whose actions are performed. `broker` builds all parts.
"""
