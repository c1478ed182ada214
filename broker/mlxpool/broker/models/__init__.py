"""The models that can be asked for: names and aliases, states, and what their files say.

All but the catalogue is pure.
"""
