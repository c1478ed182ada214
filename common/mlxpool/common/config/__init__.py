"""Settings of a pool: their schema, the text that they are read from, their bounds and origins.

Every process gets one frozen object and never changes it.
"""
