"""The `mlxpool` command.

`main` parses the command line and maps errors to exit codes. `commands` has one module for each
command or group of commands. The other modules are shared by commands.
"""
