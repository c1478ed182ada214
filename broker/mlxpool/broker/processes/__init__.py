"""Worker processes: a supervisor starts, observes and ends those of this machine.

Workers of other supervisors dial in; `remote_supervisor` is what runs on their machine.
"""
