"""The decisions of the broker: components that share one State turn events and times into actions.

Pure: no I/O, no clock, no random number.
"""
