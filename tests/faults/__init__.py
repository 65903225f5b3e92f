"""What goes wrong around a command: kills, damaged files, hostile inputs, full disks. A part of it runs in CI.

`make torture` runs all of it and prints a table. Four ends are told apart: the same bytes as an undisturbed run, one sentence,
a traceback, and silence, which is another result without a word. The last two are always wrong.
"""
