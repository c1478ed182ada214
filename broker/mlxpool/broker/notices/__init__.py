"""Notices of ended jobs and batches: signed posts to allowed hosts.

Notices are posted on their own thread: look-ups, connections and slow servers never delay the
broker's loop.
"""
