"""bubblewrap around the worker that runs strangers' answers.

Inside there is a read-only system (the libraries, this Python and its packages, the worker's own few files), a private
/tmp of bounded size, no network, no other process, no home, no variable of the grader's environment and nothing of the
course: neither `solutions/` nor `exercises/`, `tests/` or `notebooks/`. The limits of time, memory, processes and
output are the worker's own; that it runs in here it learns from COURSE_SANDBOX, and then ends every process and empties
/tmp after each answer. docs/isolation.md says what this holds off and what it does not.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from course_lib.home import ROOT

TEMPORARY_BYTES = 512 << 20
# What a program needs of /etc to start and to find its libraries; no passwords, no host's secrets.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "passwd", "group")
WORKER_FILES = ("course_lib/checker/runner/process", "course_lib/checker/common", "course_lib/hardware/meter/traffic")
KEPT_VARIABLES = ("CC", "COURSE_ISOLATION", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LANG", "TZ")
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")

# Privileges inside, from the best down. None has a capability in the end, and nothing gives it one.
MODERN = ("--unshare-user", "--disable-userns", "--cap-drop", "ALL")  # bubblewrap 0.8 and later
OLDER = ("--unshare-user", "--cap-drop", "ALL")  # further namespaces possible, /tmp not bounded
# Root becomes another user inside, in the worker's first line; as root its processes would count against no limit.
AS_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
FIRST_USER = 60000
INSTEAD = (
    "Or grade with --unsandboxed: each answer then runs in a process of its own, with no more around it than "
    "docs/isolation.md says for this system; with strangers' work, only on a machine that holds nothing else."
)
# When memory runs out the kernel ends what runs in here first, and not the grader.
LAST_TO_STAY = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")


def confined(command: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """A worker's command and environment, inside the sandbox. Open file descriptors are passed on."""
    inside = {name: value for name, value in environment.items() if name in KEPT_VARIABLES}
    inside |= {
        "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "course",
        "COURSE_SANDBOX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in ("MPLBACKEND", "OMP_NUM_THREADS", "TRITON_INTERPRET"):
        if name in environment:
            inside[name] = environment[name]
    privileges = _privileges()
    if privileges is AS_ROOT:
        inside["COURSE_SANDBOX_UID"] = str(FIRST_USER + os.getpid() % 5000)  # of its own, so that it is counted apart
    return [*LAST_TO_STAY, *_bwrap(privileges or MODERN), *command], inside


def _bwrap(privileges: tuple[str, ...]) -> list[str]:
    options = [*privileges, *NAMESPACES, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for device in sorted(glob.glob("/dev/nvidia*")):
        options += ["--dev-bind-try", device, device]
    if glob.glob("/dev/nvidia*"):
        options += ["--ro-bind-try", "/sys", "/sys"]  # where CUDA looks for its devices
    for folder in ("/tmp", "/dev/shm"):  # first, since the course itself may lie below /tmp
        options += ["--size", str(TEMPORARY_BYTES)] if privileges is not OLDER else []
        options += ["--perms", "1777", "--tmpfs", folder]
    shown = _shown()
    # bubblewrap makes missing parents for its own user alone.
    folders = {str(folder) for path in shown for folder in Path(path).parents}
    outside = sorted(folder for folder in folders - {"/"} if not any(_within(folder, path) for path in shown))
    options += [word for folder in outside for word in ("--dir", folder)]
    for path in shown:
        if os.path.islink(path) and path in SYSTEM:
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind-try", path, path]
    if any(_within(str(ROOT), path) for path in shown):
        options += ["--tmpfs", str(ROOT)]  # a course below /usr, say, is seen with it: hidden, but for what follows
        options += [word for path in shown if _within(path, str(ROOT)) for word in ("--ro-bind", path, path)]
    options += [word for folder in _parents_of_the_worker() for word in ("--dir", folder)]
    for path in WORKER_FILES:
        options += ["--ro-bind", str(ROOT / path), str(ROOT / path)]
    # Of /proc too: to whoever grades as root, the kernel's settings in /proc/sys would be open for writing.
    read_only = [word for folder in ("/dev", "/proc", "/") for word in ("--remount-ro", folder)]
    return [shutil.which("bwrap") or "bwrap", *options, *read_only, "--chdir", "/tmp", "--"]


def _parents_of_the_worker() -> list[str]:
    inner = {ROOT / path for file in WORKER_FILES for path in Path(file).parents}
    return sorted(str(path) for path in {*inner, *ROOT.parents} - {Path("/")})


def _shown() -> list[str]:
    """Folders that an answer may read: the system, this Python, and where its packages are installed."""
    python = Path(os.path.realpath(sys.executable)).parent.parent
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    compilers = [os.environ.get("CUDA_HOME", "")]
    settings = [f"/etc/{name}" for name in SETTINGS]
    wanted = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, str(python), *packages, *libraries, *compilers]
    # Never a folder that holds the course or somebody's home: with a prefix of / everything would be seen.
    forbidden = {str(place) for base in (ROOT, Path.home()) for place in (base, *base.parents)}
    chosen: dict[str, None] = {}
    for path in (*wanted, *settings):
        if not os.path.exists(path) or os.path.abspath(path) in forbidden:
            continue
        if path in SYSTEM or not any(_within(path, other) for other in chosen):
            chosen[os.path.abspath(path)] = None
    return list(chosen)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _attempt(privileges: tuple[str, ...]) -> str | None:
    """Run Python once inside; None when that works, else the last line of what was said."""
    drop = f"import os; os.setgroups([]); os.setresgid(*3 * [{FIRST_USER}]); os.setresuid(*3 * [{FIRST_USER}]); "
    program = (drop if privileges is AS_ROOT else "") + "import json; print('inside')"
    try:
        done = subprocess.run(
            [*_bwrap(privileges), sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tempfile.gettempdir(),
            env={"PATH": "/usr/bin:/bin"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout.strip() == "inside":
        return None
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


@functools.cache
def _privileges() -> tuple[str, ...] | None:
    """The first of the ways to start bubblewrap that works on this machine, found out by running it; None: none."""
    ways = (AS_ROOT, MODERN, OLDER) if os.geteuid() == 0 else (MODERN, OLDER)
    return next((way for way in ways if _attempt(way) is None), None)


def why_not() -> str | None:
    """None where the sandbox works on this machine; else the reason and what to do."""
    if not sys.platform.startswith("linux"):
        return f"Strangers' answers run in bubblewrap, which exists for Linux only: use Linux or WSL 2. {INSTEAD}"
    if shutil.which("bwrap") is None:
        return (
            "Strangers' answers run in bubblewrap, and it is not installed: `sudo apt install bubblewrap` (or dnf, "
            f"pacman, zypper). {INSTEAD}"
        )
    if _privileges() is not None:
        return None
    return (
        f"bubblewrap is installed but cannot make a sandbox here ({_attempt(MODERN)}). In a container it needs the "
        "right to make user namespaces (Docker: `--security-opt seccomp=unconfined --security-opt "
        f"systempaths=unconfined`); on Ubuntu from 23.10 on, an AppArmor profile for bwrap. {INSTEAD}"
    )
