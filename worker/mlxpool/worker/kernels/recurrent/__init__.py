"""Kernels of recurrent layers, and the plan from which they read the places of states.

They write into no array that another operation uses. A pass writes the states of its sequences
into new arrays, so a failed pass changes no state, and a sequence can go back to the state before
a pass while something refers to the array of that state.
"""
