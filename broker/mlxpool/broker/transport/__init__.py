"""The broker's sockets: the peers of each ROUTER, the front's endpoints, which worker is connected.

Also what protects them: the guard against messages that are never finished.
"""
