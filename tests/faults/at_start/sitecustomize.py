"""On PYTHONPATH of a command that is started as a user starts it: each of its processes begins with a fault."""

import os

exec(os.environ["FAULT_AT_START"], {})
