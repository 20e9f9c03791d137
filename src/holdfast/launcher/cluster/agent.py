"""A `RemoteAgent` that is spoken to over stdin and stdout, one line of JSON a call, as a step of SLURM's is.

It ends, and what it started with it, when its stdin does: then the launcher has ended, or can reach it no more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from holdfast.errors import HoldfastError, is_storage_failure
from holdfast.launcher.cluster.hosts import RemoteAgent


def main() -> None:
    """Answer calls until stdin ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A scheduler sends them to whatever it finds here; who is to end is for the launcher to say. Not ignored:
        # what is started here would inherit that.
        signal.signal(number, lambda *_: None)
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may come between the lines
    lock, place = threading.Lock(), RemoteAgent()

    def say(**message: Any) -> None:
        with lock:
            wire.write(f"{json.dumps(message)}\n")
            wire.flush()

    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = getattr(place, call["method"])(*call["arguments"])
        except (OSError, HoldfastError) as error:
            say(error=str(error), errno=getattr(error, "errno", None) if is_storage_failure(error) else None)
            continue
        say(result=result)
        if call["method"] == "start":
            # A thread of its own waits: the next call may be the one that ends the process.
            threading.Thread(target=lambda pid=result: say(ended=place.wait(), pid=pid), daemon=True).start()
    os._exit(0)  # at once; the kernel ends what was started


if __name__ == "__main__":
    main()
