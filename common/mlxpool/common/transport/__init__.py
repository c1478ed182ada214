"""ZeroMQ sockets with limits, CURVE keys, and the handshake of a connection.

Every ZeroMQ socket of mlxpool is made here.
"""
