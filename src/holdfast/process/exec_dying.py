"""Become another program that dies with its parent: `... exec_dying PARENT_PID PROGRAM ARGUMENT ...`.

For programs of others that are started behind a library, which gives no hand in how.
"""

from __future__ import annotations

import os
import sys

from holdfast.process.child import die_with_parent

if __name__ == "__main__":
    die_with_parent(parent=int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
