"""The allow-list: which key may connect in which role, and who the owner of a connection is.

Pure; the sockets of `transport` ask it at each handshake and at each message.
"""
