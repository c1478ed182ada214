"""The supervisor, which starts, observes and ends the worker processes of this machine.

Workers of other supervisors connect from outside; `remote_supervisor` runs on their machines.
"""
