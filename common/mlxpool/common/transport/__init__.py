"""ZeroMQ sockets with limits, CURVE keys, and the handshake of a connection.

Every socket of the product is made here.
"""
