"""What a process does before its work, so that other users of the machine get nothing from it and
nothing into it.
"""
