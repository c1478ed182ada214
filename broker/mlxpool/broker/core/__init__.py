"""The decisions of the broker: components around one State turn events and times into actions.

Pure: no I/O, no clock, no random number.
"""
