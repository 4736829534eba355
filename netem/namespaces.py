"""Private namespaces and the two processes that own them; the system calls that Python 3.11 has no names for.

    caller -- fork --> guard -- unshare, fork --> PID 1 of the lab -- fork --> processes

Nothing survives: the guard ends PID 1 when the caller's process is gone (it polls a pidfd, not PDEATHSIG,
which would fire when the *thread* that forked ends), the kernel ends PID 1 with the guard, and everything
with PID 1; PID 1 itself ends at the end of its control socket. Sources: namespaces(7), user_namespaces(7),
pidfd_open(2), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from thinpipe.netem.errors import NetemError
from thinpipe.netem.wire import Connection

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

REPORT_LIMIT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter(descriptor: int) -> None:
    """setns(2): this thread moves into the network namespace behind an open file. Raises OSError."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(CLONE_NEWNET)), "setns")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2) without data. Raises OSError."""
    strings = (source.encode(), target.encode(), kind.encode())
    _check(_libc.mount(*strings, ctypes.c_ulong(flags), None), f"mount {kind or source} on {target}")


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")


@contextlib.contextmanager
def inside(host: str) -> Iterator[None]:
    """This thread is in the network namespace of `ip netns` name `host` for the block."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{host}") as there:
        enter(there.fileno())
        try:
            yield
        finally:
            enter(before.fileno())


def detach_files(keep: set[int]) -> None:
    """Let go of every inherited descriptor above 2 that is not kept.

    Others' sockets must not stay open here: their ends would never be seen. The numbers are pointed at
    /dev/null, not freed: objects inherited over the fork still own them, and would close whatever reused
    them.
    """
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != null and number not in keep:
            # One of them is listdir's own, closed by now.
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(null, number, inheritable=False)
    os.close(null)


def reset_signals() -> None:
    """Signals as a fresh Python has them, but SIGINT ignored: Ctrl-C is for the client, which tears down."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
        # The C library keeps two real-time signals for itself.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)


def launch(body: Callable[[Connection], None]) -> tuple[int, socket.socket]:
    """Fork guard and PID 1; PID 1 runs body(connection) in private namespaces, with a fresh /proc and an
    empty /run.

    Returns the guard's pid (a child of the caller, which has to wait for it) and the caller's end of the
    control socket. A failure on the way is sent as {"event": "failed", "reason": text}, never raised here.
    """
    for stream in (sys.stdout, sys.stderr):
        # What is in the buffers would be printed by both sides.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ours, theirs = socket.socketpair()
    caller = os.getpid()
    pid = os.fork()
    if pid == 0:
        _last_resort(theirs, lambda: _guard(body, theirs, caller))
    theirs.close()
    return pid, ours


def _last_resort(sock: socket.socket, step: Callable[[], None]) -> NoReturn:
    """Run a step of a forked process; whatever happens, do not return into the caller's stack."""
    status = 1
    try:
        step()
        status = 0
    except BaseException as error:
        reason = str(error) if isinstance(error, NetemError) else traceback.format_exc()
        with contextlib.suppress(Exception):
            Connection(sock).send({"event": "failed", "reason": reason}, REPORT_LIMIT_S)
    finally:
        os._exit(status)


def _guard(body: Callable[[Connection], None], sock: socket.socket, caller: int) -> None:
    # Garbage inherited over the fork must not be finalised here too (a temporary folder would be removed).
    gc.freeze()
    parent = os.pidfd_open(caller)
    detach_files({sock.fileno(), parent})
    reset_signals()
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    root = os.geteuid() == 0
    _separate(root)
    own = os.pidfd_open(os.getpid())
    first = os.fork()
    if first == 0:
        _last_resort(sock, lambda: _first(body, sock, (own, parent), root))
    sock.close()
    child = os.pidfd_open(first)
    poll = select.poll()
    for descriptor in (parent, child):
        poll.register(descriptor, select.POLLIN)
    if os.getppid() == caller:
        poll.poll()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def _first(body: Callable[[Connection], None], sock: socket.socket, watched: tuple[int, int], root: bool) -> None:
    die_with_parent()
    if select.select([watched[0]], [], [], 0)[0]:
        return  # the guard ended before that took effect
    for descriptor in watched:
        os.close(descriptor)
    try:
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV)
    except OSError as error:
        raise NetemError(explain_refusal(error, root)) from error
    body(Connection(sock))


def _separate(root: bool) -> None:
    """Unshare net, mount and pid; when not root also the user namespace, in which this user then is root.

    Root gets none: inside one it would be refused the files of every other user.
    """
    flags, uid, gid = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID, os.geteuid(), os.getegid()
    try:
        unshare(flags if root else flags | CLONE_NEWUSER)
        if not root:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise NetemError(explain_refusal(error, root)) from error


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name.replace(".", "/")).read_text().strip()
    except OSError:
        return None


def explain_refusal(error: OSError, root: bool, setting: Callable[[str], str | None] = _setting) -> str:
    """What to say when namespaces or mounts are refused: which setting forbids it, how to change it."""
    said = f"private namespaces are refused here ({error.strerror or error})"
    if root:
        return (
            f"{said} although this is root: a container without CAP_SYS_ADMIN and CAP_NET_ADMIN, or whose "
            "seccomp or /proc masking forbids it. Start the container with --privileged, or run outside of it"
        )
    switches = (
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
        ("user.max_user_namespaces", "0", "10000"),
    )
    for name, off, on in switches:
        if setting(name) == off:
            return f"{said}: {name} is {off}. As root run `sysctl -w {name}={on}`, or run thinpipe as root"
    return (
        f"{said}: user namespaces are allowed by sysctl, so a container's seccomp profile forbids them. "
        "Start it with --privileged (Docker: --security-opt seccomp=unconfined --security-opt "
        "systempaths=unconfined), or run as root"
    )
