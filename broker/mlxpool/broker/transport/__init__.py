"""The broker's sockets: the peers of each ROUTER, the front's endpoints, which worker is connected.

Also the guard that ends connections when messages that were never finished fill the memory.
"""
