"""The supervisor, which starts, observes and ends the worker processes of this machine.

Other machines run `remote_supervisor`.
"""
