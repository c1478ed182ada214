"""Measurements of models that several devices compute together.

As a program it measures a model through the whole pool. `sums` measures what adds up the parts,
`engine` the steps of a group in the processes of its ranks alone, `deaths` what killed and stopped
ranks cost the streams.
"""
