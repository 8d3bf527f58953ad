"""One screen on what this machine is, what will and won't work on it, and what to do about that."""

import dataclasses
import html
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from course_lib.bootstrap import NEVER_INSTALLED, requirements, too_old
from course_lib.hardware import device
from course_lib.hardware.doctor.checks import Line, Surroundings, check_c_compiler, examine
from course_lib.hardware.meter.interpreter import needs_repair
from course_lib.home import ROOT, course_home

# What a notebook needs beside PyTorch and Triton; where one runs, JupyterLab or its like is there.
PACKAGES = ("numpy", "matplotlib", "ipywidgets", "jupytext")
MARKS = {"ok": "✓", "note": "·", "warning": "!", "problem": "✗"}
COLORS = {"ok": "#009E73", "note": "#888888", "warning": "#E69F00", "problem": "#D55E00"}


@dataclasses.dataclass(frozen=True)
class Report:
    """The doctor's findings: text in a terminal, a table in a notebook."""

    lines: tuple[Line, ...]

    @property
    def healthy(self) -> bool:
        """True when nothing is a problem."""
        return all(line.status != "problem" for line in self.lines)

    @property
    def text(self) -> str:
        rows = []
        for line in self.lines:
            rows.append(f"{MARKS[line.status]} {line.subject:<14}{line.finding}")
            if line.action:
                rows.append(f"{'':<16}→ {line.action}")
        return "\n".join(rows)

    def __str__(self):
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for line in self.lines:
            action = f"<br><b>→ {html.escape(line.action)}</b>" if line.action else ""
            rows.append(
                f'<tr><td style="color:{COLORS[line.status]};text-align:center"><b>{MARKS[line.status]}</b></td>'
                f'<td style="text-align:left;white-space:nowrap"><b>{html.escape(line.subject)}</b></td>'
                f'<td style="text-align:left">{html.escape(line.finding)}{action}</td></tr>'
            )
        return f'<table class="course-doctor">{"".join(rows)}</table>'


def doctor() -> Report:
    """Look at this machine. Shows itself in a notebook; `.text` elsewhere; `.healthy` is False on any problem."""
    return Report(examine(device.machine(), look_around()))


def main() -> int:
    """`python -m course_lib doctor`: print the report; 0 when there is no problem, else 1."""
    report = doctor()
    print(report.text)
    return 0 if report.healthy else 1


def look_around() -> Surroundings:
    """Gather what `examine` needs."""
    home, home_problem, remembered = "", None, None
    try:
        home = str(course_home())
        if not os.access(home, os.W_OK):
            home_problem = f"{home} cannot be written to"
    except OSError as error:
        home_problem = str(error)
    if home_problem is None and importlib.util.find_spec("torch"):
        from course_lib.hardware.ceilings.measured import cache_path, read_cache

        remembered = read_cache(cache_path())
    return Surroundings(
        interpreting=device.interpreting(),
        interpret_variable=os.environ.get("TRITON_INTERPRET"),
        imported_too_early=device.triton_imported_too_early(),
        interpreter_repaired=needs_repair(),
        triton_wanted=triton_wanted_by_torch(),
        numpy=installed_version("numpy"),
        c_compiler=c_compiler(),
        python_header=python_header().exists(),
        missing_packages=tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None),
        own_python=own_python(),
        colab=importlib.util.find_spec("google") is not None and importlib.util.find_spec("google.colab") is not None,
        home=home,
        home_problem=home_problem,
        ceilings=remembered,
    )


def c_compiler() -> str | None:
    """The path of the C compiler that Triton takes; None where it finds none."""
    names = [name for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name]
    return next((path for name in names if (path := shutil.which(name))), None)


def python_header() -> Path:
    """Where Triton expects this Python's header: never in the `local` folder of Debian's own scheme."""
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"]) / "Python.h"


def own_python(root: Path = ROOT) -> str | None:
    """The Python of the environment that `make lab` made, where it is there and is not the one that runs."""
    python = root / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == python.parent.parent.resolve():
        return None
    return ".venv/bin/python"


def kernel_refusal(root: Path = ROOT) -> str | None:
    """Why a notebook cannot run in this Python, and what to do; None where it can. An editor that opens a notebook may
    well choose another Python than the course's own."""
    lacks = "lacks PyTorch"
    if importlib.util.find_spec("torch"):
        wanted = requirements(str(root / "requirements.txt")) if (root / "requirements.txt").exists() else []
        old = [(name, line, too_old(name, line)) for name, line in wanted if name in NEVER_INSTALLED]
        lacks = "has " + " and ".join(f"{name} {found}, older than {line}" for name, line, found in old if found)
        if not any(found for _, _, found in old):
            return None
    choose = f"choose {root / '.venv/bin/python'} as its kernel"
    if own_python(root) is None:
        choose = f"run `make install` in {root}, then {choose}"
    return f"This notebook's Python ({sys.executable}) {lacks}: {choose}."


def launcher_warning() -> str | None:
    """What Triton lacks for its first launch on this machine's GPU, and the command that mends it; None where all is
    there, or kernels run in the interpreter."""
    if device.interpreting() or c_compiler() and python_header().exists():
        return None
    line = check_c_compiler(device.machine(), look_around())
    return f"{line.subject}: {line.finding}. {line.action}" if line else None


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_wanted_by_torch() -> str | None:
    """The exact Triton that the installed PyTorch names in its requirements; None for builds that name none."""
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        if found := re.match(r"(?:pytorch-)?triton\s*==\s*([0-9.]+)", requirement):
            return found[1]
    return None
