"""An answer as several processes of one `torch.distributed` group: what each did wrong is told with its rank."""

from dataclasses import replace

import pytest
import torch

from course_lib.checker import (
    Allocates,
    Case,
    CourseError,
    Exercise,
    Forbids,
    InOut,
    Limits,
    PerRank,
    Slip,
)
from course_lib.checker.judge.decide import judge


def _mean(rows, weight):
    return [weight * sum(rows) / len(rows) for _ in rows]


def _cases(draw):
    for length in (1, 1000):
        yield Case(f"2 ranks, {length} numbers", (PerRank(draw.normal(length) for _ in "ab"), 3.0), ranks=2)
    yield Case("3 ranks, 7 numbers", (PerRank(draw.normal(7) for _ in "abc"), 0.5), ranks=3)
    yield Case("1 rank", (PerRank([draw.normal(5)]), 2.0))


MEAN = Exercise(
    id="90.9",
    title="The mean over all ranks",
    entries=("mean",),
    cases=lambda draw: [case for case in _cases(draw) if case.ranks == 2],
    oracle=_mean,
    limits=Limits(seconds=20.0),
    requirements=(Allocates(lambda rows, weight: rows[0].numel()),),
    slips=(
        Slip(
            "not_reduced",
            "No rank gets the others' numbers.",
            formula=lambda rows, weight: [weight * row / len(rows) for row in rows],
        ),
        Slip("sum_not_mean", "That is the sum.", formula=lambda rows, weight: [weight * sum(rows) for _ in rows]),
    ),
)

RIGHT = """
import torch.distributed as dist

def mean(row, weight):
    total = row.clone()
    dist.all_reduce(total)
    return weight * total / dist.get_world_size()
"""


def with_lines(*lines):
    """The right answer with lines put before its collective."""
    return RIGHT.replace("    dist.all_reduce(total)\n", "".join(f"    {line}\n" for line in lines))


def test_a_two_rank_all_reduce_passes_on_gloo():
    verdict = judge(MEAN, RIGHT)
    assert verdict.passed and len(verdict.cases) in (2, 4), f"{verdict}; on two GPUs each case runs there too"


@pytest.mark.parametrize(
    "cell, outcome, mistake, words",
    [
        (with_lines("pass"), "failed", "not_reduced", "rank 0's result"),
        (RIGHT.replace(" / dist.get_world_size()", ""), "failed", "sum_not_mean", "rank 0's result"),
        (
            with_lines("dist.reduce(total, dst=0)", "if dist.get_rank() == 1: total.fill_(0)"),
            "failed",
            None,
            "rank 1's result",
        ),
        (
            with_lines("if dist.get_rank() == 1: raise ValueError('no')", "dist.all_reduce(total)"),
            "error",
            None,
            "ValueError (rank 1, line 6 of the cell): no",
        ),
        (with_lines("if dist.get_rank() == 1: exit()"), "error", "called_exit", "(rank 1, line 6 of the cell)"),
        (
            with_lines("if dist.get_rank() == 1: __import__('os')._exit(7)", "dist.all_reduce(total)"),
            "crashed",
            "crashed",
            "ended with status 7 on rank 1, in case “2 ranks, 1 numbers”",
        ),
        (
            with_lines("if dist.get_rank() == 1: __import__('ctypes').string_at(0)", "dist.all_reduce(total)"),
            "crashed",
            "crashed",
            "on rank 1, in case “2 ranks, 1 numbers”",
        ),
        (
            with_lines("dist.all_reduce(total)", "if dist.get_rank() == 1: row.zero_()"),
            "failed",
            "modified_input",
            "`row (rank 1)` was changed",
        ),
        (
            with_lines("dist.all_reduce(total)", "if dist.get_rank() == 1: torch.empty(100_000).fill_(0)"),
            "failed",
            "too_much_memory",
            "A tensor of 100,000 elements",
        ),
        (
            with_lines("dist.all_reduce(total)", "if dist.get_rank() == 1: total = torch.empty_like(total)"),
            "failed",
            "unwritten_memory",
            "rank 1's result",
        ),
        (RIGHT + "if dist.get_rank() == 1: raise KeyError('top')\n", "error", None, "KeyError"),
        (RIGHT + "del mean\n", "error", "missing_name", "does not define `mean`"),
    ],
    ids=[
        *("not reduced", "the sum", "rank 0 alone", "rank 1 raises", "rank 1 calls exit", "rank 1 ends its process"),
        *("rank 1 crashes", "rank 1 changes its input", "rank 1 allocates", "rank 1 returns what none wrote"),
        *("the cell raises on rank 1", "nothing defined"),
    ],
)
def test_what_a_rank_does_wrong_is_rejected_in_words(cell, outcome, mistake, words):
    verdict = judge(MEAN, cell)
    assert (verdict.outcome, verdict.mistake) == (outcome, mistake), verdict
    assert words in verdict.message, verdict


@pytest.mark.parametrize(
    "lines",
    [
        ("dist.barrier()", "parts = [total, total]", "dist.all_gather_object(parts, row)", "total = sum(parts)"),
        ("work = dist.all_reduce(total, async_op=True)", "work.wait()"),
        (
            *("other, peer = torch.empty_like(total), 1 - dist.get_rank()", "sent = dist.isend(total, peer)"),
            *("dist.recv(other, peer)", "sent.wait()", "total = total + other"),
        ),
        (
            *("import threading", "thread = threading.Thread(target=lambda: dist.all_reduce(total))"),
            *("thread.start()", "thread.join()"),
        ),
    ],
    ids=["objects", "asynchronous", "sent and received", "in a thread"],
)
def test_every_other_way_to_the_same_mean_passes(lines):
    verdict = judge(replace(MEAN, requirements=()), with_lines(*lines))
    assert verdict.passed, verdict


def test_a_new_group_is_refused_with_the_reason():
    cell = with_lines("pair = dist.new_group([0, 1])", "dist.all_reduce(total, group=pair)")
    verdict = judge(MEAN, cell)
    if not verdict.passed:  # where Landlock knows TCP
        assert verdict.outcome == "error" and "the ranks use the group that is there" in verdict.message, verdict


HANGING = {
    "rank 1 waits for a collective that rank 0 never enters": (
        with_lines("if dist.get_rank() == 1:", "    dist.all_reduce(total)"),
        ("Rank 0 was not in the cell", "Rank 1 was at line 7: `dist.all_reduce(total)`."),
    ),
    "rank 0 loops": (
        with_lines("while dist.get_rank() == 0: pass", "dist.all_reduce(total)"),
        ("Rank 0 was at line 6: `while dist.get_rank() == 0: pass`.", "Rank 1 was at line 7: `dist.all_reduce(total)`"),
    ),
}


@pytest.mark.parametrize("cell, words", HANGING.values(), ids=list(HANGING))
def test_a_rank_that_waits_for_ever_is_stopped_and_every_ranks_line_told(cell, words):
    verdict = judge(replace(MEAN, limits=Limits(seconds=6.0)), cell)
    assert (verdict.outcome, verdict.mistake) == ("timeout", "timeout"), verdict
    assert all(word in verdict.message for word in ("in case “2 ranks, 1 numbers”", "collective", *words)), verdict
    assert judge(MEAN, RIGHT).passed, "the next check works"


def test_cases_of_one_two_and_three_ranks_and_one_without_stand_in_one_exercise():
    def oracle(rows, weight):
        return _mean(rows, weight) if isinstance(rows, PerRank) else weight * rows

    def cases(draw):
        return [*_cases(draw), Case("no group", (draw.normal(5), 2.0))]

    cell = with_lines("if not dist.is_initialized(): return weight * row", "dist.all_reduce(total)")
    task = replace(MEAN, cases=cases, oracle=oracle, mistakes=(), requirements=())
    verdict = judge(task, cell)
    assert verdict.passed and len(verdict.cases) >= 5, verdict
    assert judge(task, RIGHT).outcome == "error", "without a group there is no collective"


def test_operations_are_observed_in_every_rank():
    cell = with_lines("dist.all_reduce(total)", "if dist.get_rank() == 1: torch.sort(total)")
    verdict = judge(replace(MEAN, requirements=(Forbids(("sort",)),)), cell)
    assert verdict.mistake == "forbidden_operation" and "`sort`" in verdict.message, verdict


_SENT = "(lambda message: len(message).to_bytes(8, 'little') + message)(__import__('wire')"
FORGERIES = {
    "noise": "b'\\xff' * 4096",
    "no message": "(64).to_bytes(8, 'little') + b'x' * 64",
    "no report": _SENT + ".encode({'kind': 'case', 'error': 5}))",
    "no kind": _SENT + ".encode([1]))",
}


@pytest.mark.parametrize("sent", FORGERIES.values(), ids=list(FORGERIES))
def test_a_rank_that_writes_to_its_pipe_fools_nobody(sent):
    """And breaks neither the launcher nor the judge."""
    write = f"import os, contextlib, stat\n    sent = {sent}\n    for fd in range(3, 64):\n        with contextlib"
    write += ".suppress(OSError):\n            if stat.S_ISFIFO(os.fstat(fd).st_mode): os.write(fd, sent)"
    verdict = judge(replace(MEAN, limits=Limits(seconds=6.0)), with_lines(write, "dist.all_reduce(total)"))
    assert verdict.outcome == "crashed" and "sent a message that is none" in verdict.message, verdict
    assert judge(MEAN, RIGHT).passed


PRIES = """
import socket
import torch.distributed as dist

def mean(row, weight):
    found = 0
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=2)
        found = 1
    except OSError:
        pass
    try:
        open({file!r}).read()
        found += 2
    except OSError:
        pass
    total = row.clone()
    dist.all_reduce(total)
    return weight * total / dist.get_world_size() + found
"""


def test_a_rank_reaches_its_peers_and_nothing_else():
    """Whatever answers on the loopback device, and the course's own files, stay closed."""
    import socket
    import sys

    sys.path.insert(0, str(__import__("course_lib.home").home.ROOT / "course_lib/checker/runner/process"))
    import isolation

    if isolation.landlock_version() < 4:
        pytest.skip("this kernel's Landlock does not know TCP")
    with socket.create_server(("127.0.0.1", 0)) as server:
        verdict = judge(MEAN, PRIES.format(port=server.getsockname()[1], file=__file__))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": True}, "ranks=True"),
        ({"ranks": 3}, "a PerRank holds 2 values, and there are 3 ranks"),
        ({"ranks": 2, "timed": True}, "is not timed"),
        ({"ranks": 2, "args": (InOut(torch.zeros(1)),)}, "has no argument to write"),
        ({"ranks": 2, "args": ([InOut(torch.zeros(1))],)}, "has no argument to write"),
    ],
)
def test_a_case_that_no_ranks_can_run_is_refused(wrong, words):
    with pytest.raises(CourseError) as refused:
        Case(**{"name": "two", "args": (PerRank([1, 2]),), **wrong})
    assert words in str(refused.value)
