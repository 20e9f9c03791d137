"""The command `ckpt`: look into checkpoints, check, export, thin out and import them.

main.py       from the command line to one action and an exit code
arguments.py  subcommands and flags
dirs.py     where steps and exports lie, and which step an argument means
listing.py    ls
inspecting.py verify, show
change.py     export, promote, import, prune
tensor_work.py errors and output of what needs torch: calls of `holdfast.trainer.conversion`
"""
