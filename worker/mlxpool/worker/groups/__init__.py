"""Groups: one model divided between devices, with a process (rank) for each device.

Rank 0 is the worker that the broker knows: it schedules, keeps the block tables and draws tokens.
The other ranks have no sequences. They get each pass as a message, and compute the pass with their
parts of the model.
"""
