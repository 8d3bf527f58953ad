"""What a check's child may reach: Python and its packages, its own folder, the devices, and nothing else.

On Linux 5.13 and later this is Landlock (Documentation/userspace-api/landlock.rst): no root, no set-up, and it cannot
be taken off again. The course's folder is not on the list, so neither oracles nor solutions can be read; nor can the
learner's home. TCP is closed from kernel 6.7 on, and signals to processes outside from 6.12 on. On older kernels, on
macOS, and with COURSE_ISOLATION=off, the child is only a process of its own: answers are then not importable, but a
program that looks for them on the disk can read them. A learner who does that cheats no one but themselves; grading
strangers' work needs more than this file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on x86-64 and AArch64
_NO_NEW_PRIVILEGES = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/run/nvidia-persistenced")


def landlock_version() -> int:
    """The kernel's Landlock version; 0 where there is none or COURSE_ISOLATION=off."""
    if os.environ.get("COURSE_ISOLATION") == "off" or not sys.platform.startswith("linux"):
        return 0
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, 1))


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def readable_folders() -> list[str]:
    """The system, this Python, every folder that it imports from, and the C compiler that Triton calls."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [
        *(*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *_compiler_folders()),
        *(entry for entry in (*sys.path, *libraries, os.environ.get("CUDA_HOME", "")) if entry),
    ]


def _compiler_folders() -> list[str]:
    """Where the compilers stand, with their libraries beside them; never a folder that holds somebody's home."""
    found = [shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name]
    prefixes = {Path(path).resolve().parent.parent for path in found if path}
    return [str(prefix) for prefix in prefixes if prefix != Path.home() and prefix not in Path.home().parents]


def restrict(writable: list[Path], tcp_later: bool = False) -> None:
    """Confine this process, and all that it starts, for good; does nothing where there is no Landlock.

    Args:
        writable: folders that may also be written, such as the check's own and the compiler's cache.
        tcp_later: leave TCP open, for `close_tcp` to close once the connections that are needed have been made.

    Raises:
        OSError: the kernel has Landlock but refused it.
    """
    version = landlock_version()
    if not version:
        return
    everything = _ALL_BY_VERSION[max(v for v in _ALL_BY_VERSION if v <= version)]
    rules = struct.pack(
        "<QQQ",
        everything,
        _TCP if version >= 4 and not tcp_later else 0,
        _SIGNALS_AND_ABSTRACT_SOCKETS if version >= 6 else 0,
    )
    libc = _libc()
    ruleset = _checked(libc.syscall(_CREATE_RULESET, rules, 8 if version < 4 else 16 if version < 6 else 24, 0))
    try:
        for folder in readable_folders():
            _allow(libc, ruleset, folder, _EXECUTE | _READ_FILE | _READ_DIR)
        for place in (*writable, Path("/dev")):
            _allow(libc, ruleset, place, everything)
        _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def close_tcp() -> None:
    """Close TCP for this thread and all that it starts: no new connection is made, and those there are stay."""
    if landlock_version() < 4:
        return
    libc = _libc()
    ruleset = _checked(libc.syscall(_CREATE_RULESET, struct.pack("<QQ", 0, _TCP), 16, 0))
    try:
        _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(libc, ruleset: int, path: str | Path, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # what is not there need not be allowed
    try:
        allowed = access if os.path.isdir(path) else access & _FILE_ONLY
        _checked(libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("<Qi", allowed, opened), 0))
    finally:
        os.close(opened)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock refused ({os.strerror(number)}); COURSE_ISOLATION=off runs checks without it")
    return result
