"""The broker's sockets: peers of each ROUTER, endpoints, connected workers.

The guard against unfinished messages is here too.
"""
