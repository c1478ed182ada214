"""The broker's sockets: the connections (peers) of each ROUTER socket, endpoints, worker sessions.

The guard against unfinished messages is also in this package.
"""
