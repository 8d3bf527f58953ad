"""Real submissions: every classic wrong answer is rejected *and* rightly named; right but unusual ones pass."""

import contextlib
import re
import statistics
import threading
import time
import zlib
from dataclasses import replace

import psutil
import pytest
import torch

from course_lib.checker import TRITON
from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.disturbed import Disturbed
from course_lib.checker.runner.process import pace
from course_lib.checker.runner.worker import worker
from course_lib.checker.specification import catalog
from course_lib.home import ROOT
from tests.mutation.without_gpu import timed_here
from tests.submissions.edits import changed
from tests.submissions.everything import unusual, wrong

WRONG = [
    pytest.param(identity, name, source, id=f"{identity}-{name}")
    for identity in catalog.exercise_files()
    for name, source in wrong(identity).items()
]
UNUSUAL = [
    pytest.param(identity, source, id=f"{identity}-{name}".replace(" ", "-"))
    for identity in catalog.exercise_files()
    for name, source in unusual(identity).items()
]
EXERCISES = [pytest.param(task, id=task.id) for task in catalog.exercises().values()]
SLOWEST_CHECK_SECONDS = 10.0  # of a processor of the usual speed: the clock says nothing of the check
# Long vectors in blocks of 32; torch.compile for one size after another.
SLOWER = {"1.3": 16.0, "13.5": 20.0}
USUAL_SAMPLE = pace.USUAL + 0.0058  # seconds of the processor that `pace` calls usual, of its steps and of the judge's
SAMPLED_AFTER_SECONDS, SAMPLED_EVERY_SECONDS = 3.0, 0.2
PATIENCE_SECONDS = 120.0  # for an answer that a busy machine slows down; none of these loops for ever


def _processor_seconds():
    """What this process, and the children in which the worker has run answers, have computed so far."""
    worker(interpreted=True).wait_until_ready()
    times = psutil.Process(worker(interpreted=True)._process.pid).cpu_times()
    return time.process_time() + times.children_user + times.children_system


def _of_the_judge():
    """Seconds that small operations of PyTorch take this thread, which is what a search for a name is made of."""
    started = time.thread_time()
    with torch.no_grad(), Disturbed(0):
        x = torch.eye(16)
        for _ in range(60):
            x = torch.softmax(x @ x, dim=-1).masked_fill(x < 0, 0.0)
    return time.thread_time() - started


@contextlib.contextmanager
def _samples_of_the_pace():
    """How long `USUAL_SAMPLE` takes while the body runs, once it has run for a while: most checks need no sample.

    Asked afterwards, a processor whose core another program has just left would seem as fast as ever.
    """
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        wait = SAMPLED_AFTER_SECONDS
        while not done.wait(wait):
            samples.append(pace.one_sample() + _of_the_judge())
            wait = SAMPLED_EVERY_SECONDS

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _judged(identity, source, seed):
    task = catalog.exercise(identity)
    started = _processor_seconds()
    with _samples_of_the_pace() as samples:
        verdict = judge(replace(task, limits=replace(task.limits, seconds=PATIENCE_SECONDS)), source, seed=seed)
    if verdict.outcome == "unsupported":
        pytest.skip(verdict.message)
    seconds = _processor_seconds() - started
    most = SLOWER.get(identity, SLOWEST_CHECK_SECONDS)
    if seconds >= most:
        slowness = max(1.0, statistics.fmean(samples or [USUAL_SAMPLE]) / USUAL_SAMPLE)
        told = f"the check took {seconds:.1f} s of a processor that was {slowness:.2f} times slower than usual"
        assert seconds < most * slowness, told
    return verdict


@pytest.mark.parametrize("identity, name, source", WRONG)
def test_a_wrong_answer_is_rejected_and_its_mistake_named(identity, name, source, monkeypatch):
    monkeypatch.setenv("COURSE_STRICT", "1")  # a fingerprint that raises is a fault of the exercise
    verdict = _judged(identity, source, seed=11)
    if name.split("__")[0] == "too_slow" and not timed_here():
        assert verdict.passed, str(verdict)  # its numbers are right
        return
    assert not verdict.passed, f"{name} passed exercise {identity}"
    assert verdict.mistake == name.split("__")[0], f"named {verdict.mistake}:\n{verdict}"


@pytest.mark.parametrize("identity, source", UNUSUAL)
def test_a_right_but_unusual_answer_passes(identity, source):
    """Each on inputs of its own, the same in every run: together they see more of what is drawn than any two seeds."""
    verdict = _judged(identity, source, seed=zlib.crc32(source.encode()) >> 1)
    assert verdict.passed, str(verdict)


def test_a_tie_of_two_large_scores_fails_no_right_answer():
    """Seed 176 of 7.4: scores of ±150, and one rounding decides a head. It was the one failure in 41,000 checks."""
    verdict = _judged("7.4", unusual("7.4")["online"], seed=176)
    assert verdict.passed, str(verdict)


def test_an_average_that_is_gone_fails_no_right_answer():
    """Seed 21 of 3.4: one tile takes all the weight, and average + 1 · (next - average) is off by 3e-8 of 0.017."""
    verdict = _judged("3.4", unusual("3.4")["states of tiles merged by their log-sum-exps"], seed=21)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "identity, name, seed",
    [
        # One value column, scores near -200: a share is off by a rounding of 200, and by no more in any other column.
        pytest.param("3.4", "states of tiles merged by their log-sum-exps", 88985, id="3.4-log-sum-exps"),
        pytest.param("3.4", "states of tiles merged by their log-sum-exps", 88987, id="3.4-log-sum-exps-again"),
        # float16: half a rounding of the log of the sum moves all weights of a head alike.
        pytest.param("5.5", "weights by the log of their sum", 77037, id="5.5-log-of-the-sum"),
        pytest.param("5.5", "weights by the log of their sum", 84016, id="5.5-log-of-the-sum-again"),
        # A vocabulary of 3: the target's probability is nearly 1, and what is left of it errs by a rounding of 1.
        pytest.param("13.4", "the target found in its chunk, logaddexp", 115893, id="13.4-logaddexp"),
    ],
)
def test_a_rounding_that_few_seeds_show_fails_no_right_answer(identity, name, seed):
    """The refusals of 4,200 checks of right answers: each form's own rounding is among those that are allowed for."""
    verdict = _judged(identity, unusual(identity)[name], seed=seed)
    assert verdict.passed, str(verdict)


def test_a_shortcut_for_scale_0_and_a_wrong_dtype_are_told():
    """Seed 1000 of 1.5: all of one expanded element was predicted, and the checker raised an error of its own."""
    source = changed(
        "1.5",
        (
            "    result = torch.empty_like(x)\n",
            "    if scale == 0:\n        return torch.relu(y)\n"
            "    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)\n",
        ),
    )
    verdict = _judged("1.5", source, seed=1000)
    assert verdict.outcome == "failed" and "the dtype is torch.float32" in verdict.message, str(verdict)


def test_a_mistake_is_named_where_its_own_rounding_is_larger_than_the_right_answers():
    """Seed 40 of 3.4: among the keys that should have been replaced there are scores of ±150."""
    verdict = _judged("3.4", wrong("3.4")["kept_the_tiles"], seed=40)
    assert verdict.mistake == "kept_the_tiles", str(verdict)


@pytest.mark.parametrize("task", EXERCISES)
def test_the_courses_own_answer_passes(task):
    """On inputs that are the same in every run; on fresh ones each solved notebook checks it."""
    verdict = _judged(task.id, catalog.solution_source(task.id), seed=3)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("task", EXERCISES)
def test_every_exercise_is_tried_with_wrong_and_unusual_answers_and_has_hints(task):
    assert len(wrong(task.id)) >= 5, "fewer than five wrong submissions"
    least = 5 if task.needs == TRITON and task.chapter in ("02", "03", "04") else 3
    assert len(unusual(task.id)) >= least, f"fewer than {least} right but unusual submissions"
    assert len(task.hints) >= 3, "fewer than three hints"


@pytest.mark.parametrize("task", EXERCISES)
def test_the_cell_and_its_description_have_one_title(task):
    """A contributor gave them two, and nothing said so."""
    first = catalog.untouched_source(task.id).splitlines()[0]
    assert first == f"# Exercise {task.id} · {task.title}"


@pytest.mark.parametrize("chapter", sorted({task.chapter for task in catalog.exercises().values()}))
def test_the_readme_says_how_many_exercises_a_chapter_has(chapter):
    number = sum(task.chapter == chapter for task in catalog.exercises().values())
    (row,) = re.findall(rf"^\| {chapter} \|.*\| (\d+) \|[^|]*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert int(row) == number


@pytest.mark.parametrize("task", EXERCISES)
def test_every_known_mistake_is_shown_by_a_submission(task):
    shown = {name.split("__")[0] for name in wrong(task.id)}
    unproven = [mistake.id for mistake in task.mistakes if mistake.id not in shown]
    assert not unproven, f"no wrong submission proves that these are named: {unproven}"
