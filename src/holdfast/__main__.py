"""`python -m holdfast NAME ...`: the same as `holdfast NAME ...`."""

import sys

if not sys.flags.safe_path:
    del sys.path[
        0
    ]  # the working directory, whose files must not come before Python's; see `shared.process.import_path`

from holdfast.commands.cli import main

main()
