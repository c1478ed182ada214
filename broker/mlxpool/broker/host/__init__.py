"""What the operating system says of processes and of this machine.

Each function has a portable twin for what only Linux provides.
"""
