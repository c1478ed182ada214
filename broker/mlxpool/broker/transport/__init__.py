"""The broker's sockets: peers (connections) of each ROUTER, endpoints, worker sessions.

Also the guard against unfinished messages.
"""
