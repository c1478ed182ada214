"""Worker processes: started, watched and ended by a supervisor, here or on another machine.

Also what is read of them from the operating system.
"""
