"""The hostile suite of the checker once more, in grading's sandbox: the same answers have the same outcomes there."""

import pytest

from course_lib.checker.runner.worker import confine_workers
from course_lib.grading import sandbox
from tests.checker.judge import test_hostile

pytestmark = pytest.mark.skipif(
    sandbox.why_not() is not None, reason=f"no sandbox on this machine: {sandbox.why_not()}"
)


@pytest.fixture(scope="module", autouse=True)
def in_the_sandbox():
    confine_workers(sandbox.confined)
    yield
    confine_workers(None)


# Its tests and the fixtures that they use become this module's own.
globals().update({name: value for name, value in vars(test_hostile).items() if not name.startswith("__")})
