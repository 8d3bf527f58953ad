"""What every test run needs: the tier decided before Triton is imported, and nothing written to a learner's .course."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Set for this process and for the notebooks and workers that it starts; under xdist each worker inherits it.
if "COURSE_HOME" not in os.environ:
    _home = tempfile.TemporaryDirectory(prefix="course-tests-")  # removed with this process
    os.environ["COURSE_HOME"] = _home.name

from course_lib.hardware.device import interpreting, prepare_triton
from tests import parts, proven

prepare_triton()

GPU_TESTS = Path(__file__).resolve().parent / "gpu"

# Two busy cores: an example that is slow once is no failure.
settings.register_profile("course", deadline=None, print_blob=True)
settings.load_profile("course")


def pytest_addoption(parser):
    parser.addoption("--chapter", metavar="NN", help="of the tests of single chapters only those of this one: 04")
    parser.addoption("--browser", action="store_true", help="run the tests that drive a real Chromium")
    parser.addoption("--screenshot", metavar="DIR", help="where the browser tests save a picture of each notebook")
    proven.add_options(parser)


def pytest_configure(config):
    proven.configure(config)
    parts.configure(config)


def pytest_report_header(config):
    sample = f"; {proven.DAY}={os.environ[proven.DAY]} chooses the sample" if config.getoption("--sampled") else ""
    return f"{proven.machine()}{sample}"


def chapter_of(item) -> str | None:
    """The chapter ("04") that a test is about, by its parameter; None for a test of all or of none."""
    given = getattr(item, "callspec", None) and item.callspec.params
    if not given:
        return None
    if "task" in given:
        return given["task"].chapter
    if "identity" in given:
        return given["identity"].partition(".")[0].zfill(2)
    return str(given["chapter"])[:2] if "chapter" in given else None


def pytest_collection_modifyitems(config, items):
    chapter = config.getoption("--chapter")
    if chapter:
        others = [item for item in items if chapter_of(item) not in (None, chapter)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    proven.choose(config, items)
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and interpreting():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; kernels run in the interpreter here"))
        if item.get_closest_marker("browser") and not config.getoption("--browser"):
            item.add_marker(pytest.mark.skip(reason="drives a real Chromium: ask for it with --browser"))
    # What takes longest is started first, and leaves the short tests to fill both workers' ends.
    items.sort(key=lambda item: item.path.suffix != ".ipynb" and item.get_closest_marker("slow") is None)
