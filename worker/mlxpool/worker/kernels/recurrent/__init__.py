"""Kernels of recurrent layers, and how a pass tells them where states are read and written.

They write no array that another operation reads or has: a pass writes the states of its sequences
into new arrays, so a failed pass changes none, and a sequence goes back to the state before a pass
as long as somebody has that array.
"""
