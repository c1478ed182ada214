"""The broker's sockets: peers of each ROUTER, endpoints, connected workers.

Also what protects them: the guard against messages that are never finished.
"""
