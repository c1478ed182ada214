"""The models that can be asked for: names, states, eviction and listing.

Pure; their files are read by `catalogue`.
"""
