"""The command line: one file a command, each thin over the library's functions.

`main.py` holds the table of commands. Nothing of the library imports this room.
"""
