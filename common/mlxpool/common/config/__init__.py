"""Settings of a pool: their declarations, how they are read, their bounds and their origins.

Every process gets one frozen object with its settings and never changes it.
"""
