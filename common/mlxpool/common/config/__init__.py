"""Settings: declarations, reading, bounds and origins.

Every process gets one frozen object with its settings and never changes it.
"""
