"""The models of the pool: names, states, eviction and listing.

The package is pure; `catalogue` reads the models' files.
"""
