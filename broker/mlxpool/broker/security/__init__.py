"""Access to the broker's sockets by keys: allow-list and handshakes.

`keyring` has the roles of keys and the owners of connections. It is pure. `access` consults it at
each handshake, `transport` at each message.
"""
