"""Dask: where answers are judged. By default this machine's own processes, each with a warm judge; or a cluster.

What runs on a Dask worker stands here too: it is asked to read a file's content and to judge one answer, and keeps
nothing of either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator

from course_lib.checker.runner.worker import confine_workers
from course_lib.checker.specification.errors import CourseError
from course_lib.grading import sandbox
from course_lib.grading.judging import row_of
from course_lib.grading.reading import Answer, Unreadable, answers_in
from course_lib.grading.version import course_version, version_for

WAIT_FOR_SCHEDULER, WAIT_FOR_WORKERS = 10.0, 60.0  # seconds

SETTINGS = {
    # One task at a time for each worker: one that dies takes no other answer with it.
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.scheduler.allowed-failures": 1,
    # What Dask would remember of tasks (their arguments too) and of stacks, for a dashboard that nobody looks at.
    "distributed.admin.log-length": 20,
    "distributed.admin.low-level-log-length": 20,
    "distributed.worker.profile.enabled": False,
}


def read(content: bytes) -> tuple[list[Answer], str | None]:
    """On a Dask worker: the answers in a file's content, or why there are none."""
    try:
        return answers_in(content), None
    except Unreadable as error:
        return [], str(error)


def judge_here(answer: Answer, sandboxed: bool, version: str) -> dict:
    """On a Dask worker: one answer's row, from the judge that this process keeps warm.

    Raises:
        CourseError: this worker's course is another than the one that asks, or it has no sandbox.
    """
    here = version_for(answer.exercise)
    if here != version:
        raise CourseError(f"a worker has version {here} of exercise {answer.exercise}, and the grader {version}")
    if sandboxed and (reason := sandbox.why_not()):
        raise CourseError(reason)
    confine_workers(sandbox.confined if sandboxed else None)
    return row_of(answer)


def _about_worker() -> tuple[str, str | None]:
    return course_version(), sandbox.why_not()


@contextlib.contextmanager
def connected(jobs: int | None, scheduler: str | None, sandboxed: bool) -> Iterator:
    """A Dask client whose workers can judge.

    Args:
        jobs: processes on this machine; one for each core by default.
        scheduler: the address of a cluster that is there, "tcp://host:8786"; then `jobs` says nothing.
        sandboxed: whether its workers must have bubblewrap.

    Raises:
        CourseError: Dask is not installed, the cluster does not answer, or its workers cannot judge.
    """
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError:
        raise CourseError(
            "Grading runs on Dask, which is not installed here: `pip install -r requirements-grade.txt`."
        ) from None
    if not scheduler and sandboxed and (reason := sandbox.why_not()):
        raise CourseError(reason)
    dask.config.set(SETTINGS)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters of it is said in sentences here
    with contextlib.ExitStack() as stack:
        if scheduler:
            try:
                client = stack.enter_context(Client(scheduler, timeout=WAIT_FOR_SCHEDULER, set_as_default=False))
            except Exception as error:
                raise CourseError(f"No Dask scheduler answers at {scheduler} ({_brief(error)}).") from None
            _require_able_workers(client, scheduler, sandboxed)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="course-grade-"))
            cluster = LocalCluster(
                n_workers=jobs or os.cpu_count() or 1,
                threads_per_worker=1,
                dashboard_address="127.0.0.1:0",
                security=True,  # others on this machine cannot give these workers anything to run
                local_directory=folder,
                preload=["course_lib.grading.uninterrupted"],
                silence_logs=logging.CRITICAL,
            )
            stack.enter_context(cluster)
            client = stack.enter_context(Client(cluster, set_as_default=False))
        yield client


def _require_able_workers(client, scheduler: str, sandboxed: bool) -> None:
    try:
        client.wait_for_workers(1, timeout=WAIT_FOR_WORKERS)
        client.run_on_scheduler(course_version)  # it unpacks tasks too
        answers = client.run(_about_worker)
    except TimeoutError:
        raise CourseError(f"The scheduler at {scheduler} has no workers: start some with dask worker.") from None
    except Exception as error:
        raise CourseError(
            f"The cluster at {scheduler} cannot judge ({_brief(error)}). Start its scheduler and its workers with the "
            "course's Python and PYTHONPATH set to the folder of this same course."
        ) from None
    for worker, (version, reason) in answers.items():
        if version != course_version():
            raise CourseError(
                f"The worker {worker} has version {version} of the course, and you have {course_version()}. Bring both "
                "to the same."
            )
        if sandboxed and reason:
            raise CourseError(f"On the worker {worker}: {reason}")


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
