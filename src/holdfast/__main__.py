"""`python -m holdfast NAME ...`: the same as `holdfast NAME ...`."""

import sys

# The working directory, whose files must not come before Python's: see `process.imports`.
if not sys.flags.safe_path:
    del sys.path[0]

from holdfast.cli import main

main()
