"""What the worker does besides when it is alone in a sandbox with a process namespace and temporary folders of its own.

One worker runs many strangers' answers there, so after each of them every other process is ended and every file that
was left is deleted; and while one runs, its processes are counted together, which limits on single processes do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
from pathlib import Path

TEMPORARY_FOLDERS = ("/tmp", "/dev/shm")
OUR_PROCESSES = 2  # the sandbox's first process and the worker; everything else is the answer's
THREADS = 64  # that the worker and the libraries of an answer may start for themselves
_SET_DUMPABLE = 4
_there_at_first: set[str] = set()  # the way to a course or a Python that lies below /tmp


def inside() -> bool:
    """Whether this process was started in such a sandbox."""
    return os.environ.get("COURSE_SANDBOX") == "1"


def begin() -> None:
    """Note what is in the temporary folders, and give up root, whose processes no limit on their number counts."""
    if inside():
        _there_at_first.update(entry.path for folder in TEMPORARY_FOLDERS for entry in os.scandir(folder))
    if inside() and "COURSE_SANDBOX_UID" in os.environ:
        user = int(os.environ.pop("COURSE_SANDBOX_UID"))
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def limit_processes(processes: int) -> None:
    """A bound that the kernel keeps on the answer's processes and threads, so that none starve who would count them.

    Before Linux 5.14 it would count the user's processes outside the sandbox too.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if inside() and version >= (5, 14):
        resource.setrlimit(resource.RLIMIT_NPROC, (THREADS + processes, THREADS + processes))


def guard(protected: bool) -> None:
    """Keep other processes of this user from reading and tracing this one (the worker), or allow it again (a child)."""
    if inside():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0 if protected else 1, 0, 0, 0)


def excess(limits: dict) -> str | None:
    """The limit that the answer's processes exceed together: "processes", "memory" or None."""
    if not inside():
        return None
    others = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(others) > OUR_PROCESSES + limits["processes"]:
        return "processes"
    if len(others) > OUR_PROCESSES + 1 and limits["memory_bytes"]:  # one alone has a limit of its own
        allowed = 2 * limits["memory_bytes"]
        # The quick sum counts what processes share once for each; only beyond the limit is it worth counting rightly.
        if sum(_memory(pid, "status", ("RssAnon:", "RssShmem:")) for pid in others) > allowed:
            if sum(_memory(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in others) > allowed:
                return "memory"
    return None


def _memory(pid: str, file: str, names: tuple[str, ...]) -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc", pid, file).read_text().splitlines():
            if line.startswith(names):
                total += int(line.split()[1]) << 10
    return total


def clean_up() -> None:
    """End every process but this one and the sandbox's first, and delete every temporary file."""
    if not inside():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    for folder in TEMPORARY_FOLDERS:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.path in _there_at_first:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
