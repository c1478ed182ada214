"""Posts notices of ended jobs over HTTP, signed, to hosts that the settings allow.

Threads of its own do that: names, connections and slow servers never hold up the broker's loop.
"""
