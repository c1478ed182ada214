"""Access control of the broker's sockets by keys: allow-list and handshakes.

`keyring` has the roles of keys and the owners of connections; it is pure. `access` uses it at each
handshake, `transport` at each message.
"""
