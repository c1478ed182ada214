"""Decides: components around one State, from an event and a time to actions.

Pure: no I/O, no clock, no random number.
"""
