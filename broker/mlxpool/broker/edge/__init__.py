"""Sockets, timers and signals around the core: one loop on one thread.

It makes events of messages and performs the core's actions.
"""
