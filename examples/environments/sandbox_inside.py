"""The inside of the sandbox: a script of the standard library alone, run by `python_code.py` with a bare interpreter.

Three processes: this one, the first of new namespaces, which builds the file system, gives up its rights and waits,
and the program. When one of the first two dies, whoever killed it, the kernel ends all that the program started. A
program that is killed counts as one that ended: it can kill itself, and must not have its rollout played again by that.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
from typing import Any, NoReturn

SETUP_FAILED = 71  # EX_OSERR of sysexits.h; `python_code.py` knows it
KILLED = 72  # a process of the sandbox's own was killed, which nothing inside can do; `python_code.py` knows it
_NOBODY = 65534
# Of linux/sched.h, linux/mount.h, linux/prctl.h and fcntl.h.
_NAMESPACES = {"mount": 0x00020000, "UTS": 0x04000000, "IPC": 0x08000000, "user": 0x10000000, "PID": 0x20000000,
               "network": 0x40000000}  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SECCOMP_KILL, _SECCOMP_ERRNO, _SECCOMP_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442  # the same everywhere
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # Namespaces of its own would give a program rights back, and file systems in memory without a bound.
    "unshare": (272, 97), "setns": (308, 268),
    # Memory that no limit of a process counts.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "io_uring_setup": (425, 425),
    # Keys are not of a namespace: those of whoever started the run would be there.
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # A program needs none of these, and the kernel has had holes there.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
}  # fmt: skip
"""System calls that fail, with their numbers on x86_64 and aarch64."""
_CLONE, _CLONE3, _SOCKET = (56, 220), 435, (41, 198)
_CLONE_NEW = 0x7E020000
_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6. Others are of no network namespace: VSOCK reaches the host of a virtual machine."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Read a program from stdin, run it inside, and end when it has ended."""
    limits = json.loads(sys.argv[1])
    _die_with_parent(limits["parent"])
    program = sys.stdin.buffer.read()
    try:
        _enter_namespaces()
        alive, held = os.pipe()
        if os.fork() == 0:
            os.close(held)
            _first_process(program, limits, alive)
        os.close(alive)
    except OSError as error:
        _fail(error)
    _, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(KILLED if code < 0 else SETUP_FAILED if code == SETUP_FAILED else 0)


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def _enter_namespaces() -> None:
    """Leave the namespaces of everybody else; user 65534 is inside what this process is outside, or nobody for root."""
    parent, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    entered, is_entered = os.pipe()
    writer = os.fork()
    if writer == 0:  # maps are written from outside: only there may root map two users
        os.close(is_entered)
        os.read(entered, 1)
        os._exit(_write_maps(parent, uid, gid))
    os.close(entered)
    _check(_libc.unshare(sum(_NAMESPACES.values())), "unshare")
    os.close(is_entered)
    _, status = os.waitpid(writer, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os._exit(KILLED)
        raise OSError(code, f"writing the map of users: {os.strerror(code)}")
    # Taking on the rights inside has reset it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_maps(pid: int, uid: int, gid: int) -> int:
    try:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
        for name, own in (("uid", uid), ("gid", gid)):
            # The kernel bounds the number of processes of everybody but root, so root becomes somebody.
            lines = f"0 0 1\n{_NOBODY} {_NOBODY} 1\n" if uid == 0 else f"{_NOBODY} {own} 1\n"
            with open(f"/proc/{pid}/{name}_map", "w") as file:
                file.write(lines)
    except OSError as error:
        return error.errno or 1
    return 0


def _first_process(program: bytes, limits: dict[str, Any], alive: int) -> NoReturn:
    """Build what the program sees, give up all rights, start it, and wait for its end."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # the parent ended before the call above
        os._exit(1)
    try:
        _build_root(limits["visible"], limits["files_bytes"])
        _give_up_rights()
        running = os.fork()
        if running == 0:
            _run(program, limits)
    except OSError as error:
        _fail(error)
    # Not for an orphan of the program's, which becomes a child of this process, the first of its namespace. Whatever
    # the program leaves running ends with it.
    while os.wait()[0] != running:
        continue
    os._exit(0)


def _build_root(visible: list[str], files_bytes: int) -> None:
    """Let the file system be the directories of `visible`, read-only, a few devices and a small /tmp in memory."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=64k")
    os.mkdir("/tmp/new")
    os.mkdir("/tmp/old")
    _mount("/tmp/new", "/tmp/new", None, _MS_BIND)
    _pivot_root("/tmp", "/tmp/old")
    os.chdir("/new")
    for path in visible:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), f"/new{path}")
        elif os.path.isdir(f"/old{path}"):
            os.makedirs(f"/new{path}", exist_ok=True)
            _mount(f"/old{path}", f"/new{path}", None, _MS_BIND | _MS_REC)
    os.mkdir("/new/dev")
    for name in _DEVICES:
        open(f"/new/dev/{name}", "w").close()
        _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _MS_BIND)
    os.mkdir("/new/tmp")
    _set_read_only("/new")
    _mount("tmpfs", "/new/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={files_bytes},nr_inodes=1000")
    _pivot_root(".", ".")
    # The old root lies over the new one now.
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/tmp")


def _give_up_rights() -> None:
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability)  # fails for those that this kernel does not know
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _refuse_system_calls()
    # Changing the user has reset it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_DUMPABLE, 0)


def _refuse_system_calls() -> None:
    """Let the kernel refuse what rights and limits leave open, for good and for all processes from here on."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the sandbox knows {', '.join(_ARCHITECTURES)}, and this is {machine}")
    column = list(_ARCHITECTURES).index(machine)
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, first_argument = 0, 4, 16  # of struct seccomp_data; both machines are little-endian
    refuse = (give, 0, 0, _SECCOMP_ERRNO | errno.EPERM)
    # Jumps count the instructions that are passed over: where it holds, where it does not.
    code = [
        (load, 0, 0, architecture),
        (equal, 1, 0, _ARCHITECTURES[machine]),
        (give, 0, 0, _SECCOMP_KILL),
        (load, 0, 0, number),
        (at_least, 0, 1, 0x40000000),  # the same calls once more, by the numbers of x32
        (give, 0, 0, _SECCOMP_KILL),
    ]
    for numbers in _REFUSED.values():
        code += [(equal, 0, 1, numbers[column]), refuse]
    # What it creates is behind a pointer. Without it the C library takes clone.
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, _SECCOMP_ERRNO | errno.ENOSYS)]
    code += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, first_argument), (has_bits, 0, 1, _CLONE_NEW), refuse]
    code += [(load, 0, 0, number), (equal, 0, 2 + len(_FAMILIES), _SOCKET[column]), (load, 0, 0, first_argument)]
    code += [(equal, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    code += [(give, 0, 0, _SECCOMP_ERRNO | errno.EAFNOSUPPORT), (give, 0, 0, _SECCOMP_ALLOW)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "prctl")


def _run(program: bytes, limits: dict[str, Any]) -> NoReturn:
    """Become the program: its output, stderr too, is all that leaves the sandbox."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)
    os.closerange(3, 4096)
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits["files_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: limits["processes"],
    }
    for name, bound in bounds.items():
        resource.setrlimit(name, (bound, bound))
    # The signal after so many seconds can be ignored; the one a second later cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    code = 0
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - of others' code, SystemExit too
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _fail(error: OSError) -> NoReturn:
    os.write(2, str(error).encode())
    os._exit(SETUP_FAILED)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount of {target}")


def _set_read_only(path: str) -> None:
    """Make the mount at `path` and all below it read-only; flags that are locked stay as they are."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    arguments = (ctypes.c_long(_AT_FDCWD), path.encode(), ctypes.c_long(_AT_RECURSIVE), attributes, ctypes.c_long(32))
    _check(_libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments), "mount_setattr")


def _pivot_root(new: str, old: str) -> None:
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"the sandbox knows {', '.join(_SYS_PIVOT_ROOT)}, and this is {os.uname().machine}")
    _check(_libc.syscall(ctypes.c_long(number), new.encode(), old.encode()), "pivot_root")


if __name__ == "__main__":
    main()
