"""Access to the broker's sockets by keys: allow-list and handshakes.

`keyring` says which key may connect in which role, and who the owner of a connection is. Pure;
`zap` asks it at each handshake, and `transport` at each message.
"""
