"""Settings: declarations, reading, bounds and origins.

Every process gets its settings in one frozen object.
"""
