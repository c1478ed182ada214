"""The supervisor: starts, observes and ends the worker processes of this machine.

Workers of other supervisors dial in; `remote_supervisor` runs on their machines.
"""
