"""The broker's process: one loop on one thread around the pure core.

Messages become events for the core. The actions that the core returns are performed here. `broker`
builds all parts.
"""
