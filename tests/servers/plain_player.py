"""Plays in the place of `verifiers_player.py`, without verifiers: how often it was started says what it does.

    python plain_player.py <pid of who starts it> <socket>

Its settings are `starts`, one word for each start, and `directory`, in which it counts them:

    plays    plays: task 0 ends it, task 1 asks the endpoint once and earns the number of the start, task 2 says
             so at the named pipe `asked` and takes for ever, task 3 fails; what is cancelled it says at `cancelled`
    exits    ends while it loads
    killed   gets SIGKILL while it loads
    stops    gets SIGSTOP while it loads
    falls    gets SIGKILL while it writes its first answer
    refuses  says that it cannot be loaded
    other    has one task more
    waits    says that it has begun at the named pipe `began`, and waits for who writes `go`"""

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(asked: dict[str, Any]) -> None:
    body = json.dumps({"model": asked["model"], "messages": [{"role": "user", "content": "ab"}]}).encode()
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{asked['base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        answer.read()


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb", buffering=0) as stream:
        settings = json.loads(stream.readline())["env"]
        directory = Path(settings["directory"])
        with open(directory / "starts", "a+") as file:
            file.write(f"{os.getpid()}\n")
            file.seek(0)
            number = len(file.readlines())
        word = settings["starts"][number - 1]
        if word == "exits":
            return
        if word in ("killed", "stops"):
            os.kill(os.getpid(), signal.SIGKILL if word == "killed" else signal.SIGSTOP)
        if word == "waits":
            (directory / "began").write_text("x")
            (directory / "go").read_text()
        num_tasks = {"num_tasks": 5 if word == "other" else 4}
        stream.write(json.dumps({"failed": "no such thing"} if word == "refuses" else num_tasks).encode() + b"\n")
        for line in stream:
            asked = json.loads(line)
            if "cancel" in asked:
                (directory / "cancelled").write_text(str(asked["cancel"]))
            elif word == "falls":
                stream.write(b'{"play": ')
                os.kill(os.getpid(), signal.SIGKILL)
            elif asked["task"] == 0:
                os._exit(7)
            elif asked["task"] == 2:
                (directory / "asked").write_text("x")
            else:
                ask(asked)
                found = {"failed": "so"} if asked["task"] == 3 else {"reward": number, "metrics": {"length": 1.0}}
                stream.write(json.dumps({"play": asked["play"], **found}).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[2]))
