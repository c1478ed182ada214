"""The models of the pool: names, states, eviction and listing.

Pure; `catalogue` reads the models' files.
"""
