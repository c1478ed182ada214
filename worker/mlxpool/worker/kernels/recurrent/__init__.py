"""Kernels of recurrent layers, and the plan with the locations of states.

The kernels write into no array that another operation uses. A pass writes the states of its
sequences into new arrays. So a failed pass changes no state, and a sequence can return to the state
before a pass while the array of this state is referenced.
"""
