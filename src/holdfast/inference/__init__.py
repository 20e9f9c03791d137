"""The inference server: vLLM with our own routes, and weights that can be swapped while it runs.

    main                  the program, and the checks before vLLM is imported
    server                starts, serves and ends the engine and the web server before it
    routes, access        routes, access rules, ownership by one run, decoding of bodies
    weights               which weights serve, the one way to swap them, and counters
    weight_files          reads and checks published weights
    engine, worker        vLLM, set up from our configuration, and our part of its worker process

No other package imports vLLM.
"""

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Preflight:
    """The results of the checks.

    Attributes:
        sock: bound to the configured address, not listening yet.
        admin_token: the token that the admin routes ask for; None: no token, only this machine can reach them.
    """

    sock: socket.socket
    admin_token: str | None
    model_dir: Path
    tokenizer_dir: Path
