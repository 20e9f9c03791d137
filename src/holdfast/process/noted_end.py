"""Run another program that dies with its parent, and tell the parent how it ended: `Ending`, and a process between.

For programs that a library starts without reporting how they ended. The process between is `... noted_end PARENT_PID
DESCRIPTOR PROGRAM ARGUMENT ...`. It holds the pipes of the program open until it has written the end down, so a reader
of their end finds it.
"""

import os
import signal
import sys

from holdfast.process.child import die_with_parent, killed_by
from holdfast.process.imports import module_command

_PLACE = 16
"""Bytes of the memory for the end; the program's process id comes after them."""


class Ending:
    """How a program ended, in memory that the process between writes to."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("holdfast-ending", os.MFD_CLOEXEC)

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command that runs `program` below the process between."""
        return module_command("holdfast.process.noted_end", str(os.getpid()), str(self._memory), program, *arguments)

    def is_from_outside(self) -> bool:
        """Whether the program, which is over, was killed; True also if the process between was. Shells and other
        programs that run the server say 128 + the signal that it was killed by."""
        noted = os.pread(self._memory, _PLACE, 0).strip(b"\0")
        return not noted or killed_by(int(noted)) is not None or killed_by(128 - int(noted)) is not None

    def is_stopped(self) -> bool:
        """Whether the program, or a server that it runs, stands still by a signal.

        Processes in sessions of their own do not count: a shell's jobs stop as soon as they want to read its terminal.
        """
        import psutil  # takes 0.03 s, and few processes come here

        try:
            program = psutil.Process(int(os.pread(self._memory, _PLACE, _PLACE)))
            processes = (program, *program.children(recursive=True))
            stopped = [one.pid for one in processes if one.status() == psutil.STATUS_STOPPED]
            return os.getsid(program.pid) in map(os.getsid, stopped)
        except (ValueError, ProcessLookupError, psutil.NoSuchProcess):
            return False

    def close(self) -> None:
        """Free the memory."""
        os.close(self._memory)


def _run(parent: int, descriptor: str, command: list[str]) -> None:
    die_with_parent(parent=parent)
    memory = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)
    between = os.getpid()
    program = os.fork()
    if program == 0:
        try:
            die_with_parent(parent=between)
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"error: '{command[0]}' cannot be run: {error.strerror}\n")
        finally:
            os._exit(127)
    os.pwrite(memory, str(program).encode(), _PLACE)
    # It is sent to the group: the program, which dies with this process, shall have the time to clear up. Many programs
    # end with 0 then, as if they had finished.
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os.write(memory, str(-stopped[0] if stopped else code).encode())
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
