"""The command `ckpt`: look into checkpoints, check, compare, export, thin out and import them.

main.py       from the command line to one action and an exit code
arguments.py  subcommands and flags
places.py     where steps and exports lie, and which step an argument means
look.py       ls, verify, show, diff: nothing is changed
change.py     export, promote, import, prune
report.py     tables and numbers for people
requests.py   what `python -m trainer.snapshots` is asked, and what it answers: all that needs torch
"""
