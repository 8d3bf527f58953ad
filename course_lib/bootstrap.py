"""Gets the course and what it needs onto a machine that has neither.

Two readers use this file. The builder takes FIRST_CELL, the code cell that it puts at the head of every notebook. And
`make`, or that cell, runs the file as a script, by any Python and before anything is installed:

    python course_lib/bootstrap.py environment .venv           a virtual environment, or what hinders it, in a sentence
    python course_lib/bootstrap.py missing requirements.txt    installs what is missing, never torch or Triton
    python course_lib/bootstrap.py missing --notebook          the same for a notebook that something else serves

So it imports nothing but the standard library, nothing of course_lib, and keeps to the grammar of old Pythons, which
must be able to read the sentence that turns them away.
"""

import os
import re
import subprocess
import sys

# THE place that names where notebooks on their own get the course from: a git URL, or the address of a .tar.gz or .zip
# of it. Empty until the course is published: a notebook then says what to set. After a change: make notebooks.
COURSE_REPOSITORY = ""

FIRST_CELL = """\
# Set-up. Beside the course this cell only finds it; in Colab, say, it fetches the course first.
import importlib.util, os, shutil, subprocess, sys, urllib.request
from pathlib import Path

COURSE_REPOSITORY = os.environ.get("COURSE_REPOSITORY", "{repository}")  # a git URL, or a .tar.gz or .zip of the course

if importlib.util.find_spec("course_lib") is None:
    here, fetched = Path.cwd(), Path.cwd() / "attention-course"
    course_in = lambda folders: next((str(f) for f in folders if (f / "course_lib/home.py").exists()), None)
    root = course_in([here, *here.parents])
    if root is None:
        if not course_in([fetched, *fetched.glob("*")]):
            if not COURSE_REPOSITORY:
                raise RuntimeError("The course is not here: set COURSE_REPOSITORY above to its address.")
            if COURSE_REPOSITORY.endswith((".zip", ".tar.gz")):
                archive, _ = urllib.request.urlretrieve(COURSE_REPOSITORY, Path(COURSE_REPOSITORY).name)
                shutil.unpack_archive(archive, fetched)
            else:
                subprocess.run(["git", "clone", "--depth", "1", COURSE_REPOSITORY, fetched], check=True)
        root = course_in([fetched, *fetched.glob("*")])
        subprocess.run([sys.executable, root + "/course_lib/bootstrap.py", "missing", "--notebook"], check=True)
    sys.path.insert(0, root)
"""

# Before 3.10.10 `inspect` cuts decorated functions short, and a kernel's source is what Triton compiles.
OLDEST, NEWEST = (3, 10, 10), (3, 13)
# Gigabytes, and matched to the machine's driver by whoever set it up: reported when missing, never installed over.
NEVER_INSTALLED = ("torch", "triton")
# A notebook that runs is served by something already, and is not what tests the others. jupytext it does need, to be
# reset and to read answers in .py files.
NOT_FOR_A_NOTEBOOK = ("jupyterlab", "nbmake")


def requirements(path):
    """The requirements of a file and of those that it includes: a list of (name, requirement as pip takes it)."""
    found = []
    with open(path) as lines:
        for line in lines:
            line = line.split("#")[0].strip()
            if line.startswith("-r "):
                found += requirements(os.path.join(os.path.dirname(path), line[3:].strip()))
            elif line:
                requirement, _, marker = line.partition(";")
                if not marker or sys.platform.startswith("linux"):  # the one marker used here is Linux
                    found.append((re.match(r"[A-Za-z0-9._-]+", requirement).group(), requirement.strip()))
    return found


def module_of(name):
    """The module that a distribution is imported as: most are called alike."""
    others = {"pytest-xdist": "xdist", "sphinx-mathjax-offline": "sphinx-mathjax-offline"}
    return others.get(name, name.replace("-", "_"))


def importable(module):
    import importlib.util  # here, for a Python 2 that must get as far as its sentence

    return importlib.util.find_spec(module) is not None


def too_old(name, requirement):
    """The installed version where it is older than the requirement's oldest; None where it is not, or is not known."""
    from importlib.metadata import PackageNotFoundError, version

    oldest = re.search(r">=\s*([0-9.]+)", requirement)
    try:
        found = version(name)
    except PackageNotFoundError:
        return None  # importable all the same: put there by no package manager
    return found if oldest and numbers(found) < numbers(oldest.group(1)) else None


def numbers(version):
    """[2, 10, 0] of "2.10.0+cu130": lists of these compare as versions do."""
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def missing(path, notebook=False):
    """The requirements of the file at `path` that are not met: (name, requirement, version that is too old or None)."""
    found = []
    for name, requirement in requirements(path):
        if notebook and name in NOT_FOR_A_NOTEBOOK:
            continue
        if not importable(module_of(name)):
            found.append((name, requirement, None))
        elif too_old(name, requirement):
            found.append((name, requirement, too_old(name, requirement)))
    return found


def install_missing(path, notebook=False):
    """Installs what is missing or too old into the running Python and returns the exit status."""
    wanted = missing(path, notebook)
    left_to_you = [each for each in wanted if each[0] in NEVER_INSTALLED]
    if left_to_you:
        lacks = " and ".join(name for name, _, old in left_to_you if not old)
        has = " and ".join("%s %s" % (name, old) for name, _, old in left_to_you if old)
        said = " and ".join(part for part in (lacks and "lacks " + lacks, has and "has " + has + ", too old") if part)
        say(
            "This Python (%s) %s, which the course does not install into an environment of yours. Install it the way "
            "that fits your GPU, for example: %s -m pip install %s"
            % (
                sys.executable,
                said,
                sys.executable,
                " ".join('"%s"' % requirement for _, requirement, _ in left_to_you),
            )
        )
        return 1
    if not wanted:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pip may still move torch as a dependency of something else: pinned to what is here, it cannot.
    return subprocess.call(command + [requirement for _, requirement, _ in wanted] + pins())


def pins():
    """Requirements that hold torch and Triton at the versions that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    held = []
    for name in NEVER_INSTALLED:
        try:
            held.append("%s==%s" % (name, version(name)))
        except PackageNotFoundError:
            pass  # not installed, or by no package manager: nothing to hold
    return held


def obstacle():
    """Why this Python cannot make the course's environment, as one sentence; None when it can."""
    here = "This is Python %d.%d.%d (%s)" % (tuple(sys.version_info[:3]) + (sys.executable,))
    if sys.version_info[:3] < OLDEST or sys.version_info[:2] > NEWEST:
        return "%s and the course needs Python 3.10.10 to 3.13: install one, or name it as in PYTHON=python3.12." % here
    if not (importable("venv") and importable("ensurepip")):
        return (
            "%s, which cannot make a virtual environment: on Debian and Ubuntu run `sudo apt install python3.%d-venv`, "
            "or use this Python as it is with VENV=none." % (here, sys.version_info[1])
        )
    return None


def make_environment(folder):
    """Makes a virtual environment in `folder` and returns the exit status."""
    reason = obstacle()
    if reason is None and os.path.isdir(folder) and os.listdir(folder):
        if not os.path.exists(os.path.join(folder, "pyvenv.cfg")):
            reason = "%s is no virtual environment and is not empty: name another folder with VENV=folder." % folder
    if reason is not None:
        say(reason)
        return 1
    say("Making a virtual environment in %s with %s." % (folder, sys.executable))
    return subprocess.call([sys.executable, "-m", "venv", "--clear", folder])


def say(text):
    sys.stderr.write(text + "\n")


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "environment":
        return make_environment(arguments[1])
    if arguments == ["missing", "--notebook"]:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return install_missing(os.path.join(root, "requirements.txt"), notebook=True)
    if len(arguments) == 2 and arguments[0] == "missing":
        return install_missing(arguments[1])
    say(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
