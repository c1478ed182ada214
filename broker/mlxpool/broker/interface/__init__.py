"""What the edge and the core exchange: events in, actions out.

The lowest package of the broker: it imports nothing but what all processes share.
"""
