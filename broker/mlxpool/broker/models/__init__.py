"""The models of the pool: names, states, eviction and listing.

Pure; their files are read by `catalogue`.
"""
