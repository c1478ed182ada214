"""Groups: one model divided between devices, with a process (rank) for each.

Rank 0 is the worker that the broker knows: it schedules, keeps the block tables and draws tokens.
The other ranks hold no sequence: each pass comes to them as a message, and they compute their part.
"""
