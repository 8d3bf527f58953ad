"""Matrix units and exponentials of a Hopper multiprocessor over time: in turn, at once, and at once within a group.

A model, not a trace. Two warp groups, each with 64 queries, stream over blocks of keys. A block costs a group two
products, S = Q Kᵀ and O += P V, and a softmax between them. Both units have the rates of the datasheet for each cycle,
4096 FLOPs and 16 exponentials. A softmax is more than its exponentials (maxima, multiply-adds, sums, casts), which
makes it longer by `softmax_factor`; 1.3 is fitted to one figure, an H200's 588 TFLOP/s at head dimension 64, where the
softmax is the limit, against its 745 for plain matrix products. Who waits for whom is as in the kernel.
"""

import math
from dataclasses import dataclass, field

from matplotlib.patches import Patch

from course_lib.figures.style import BLUE, INK, ORANGE, SKY, YELLOW, new_figure, styled

FLOPS_PER_CYCLE, EXPS_PER_CYCLE = 4096, 16
GROUP_ROWS, KEY_ROWS = 64, 128
SOFTMAX_FACTOR = 1.3
COLORS = {(0, "matrix"): BLUE, (1, "matrix"): SKY, (0, "softmax"): ORANGE, (1, "softmax"): YELLOW}


@dataclass
class Task:
    """A piece of work of one group on one unit; `work` in cycles, if the unit does nothing else."""

    group: int
    what: str  # "S", "softmax" or "O"
    block: int
    work: float
    after: list = field(default_factory=list, repr=False)
    ready: float = math.inf  # when it may begin; infinite until then, as are its begin and its end
    begin: float = math.inf
    end: float = math.inf

    @property
    def unit(self) -> str:
        return "softmax" if self.what == "softmax" else "matrix"


SCHEDULES = {  # groups, whether they take turns, whether each overlaps its own work
    "one group, in turn": (1, False, False),
    "one group, overlapped": (1, False, True),
    "two groups, in step": (2, False, False),
    "two groups, in step, overlapped": (2, False, True),
    "two groups, taking turns": (2, True, False),
    "two groups, taking turns, overlapped": (2, True, True),
}

DRAWN = (
    "one group, in turn",
    "one group, overlapped",
    "two groups, in step",
    "two groups, taking turns",
    "two groups, taking turns, overlapped",
)


def run_schedule(name: str, head_dim: int = 128, blocks: int = 40, softmax_factor=SOFTMAX_FACTOR) -> list[Task]:
    """The tasks of a schedule, each with its begin and end in cycles, in order of their ends.

    Args:
        name: a key of SCHEDULES. "in step" shares the matrix units between the groups, as the hardware does when both
            ask at once; "taking turns" gives all of them to who asked first; "overlapped" asks for the next S
            and for this O before the next softmax.
        blocks: blocks of 128 keys that each group goes through.
    """
    if name not in SCHEDULES:
        raise ValueError(f"name was {name!r}; allowed are {', '.join(SCHEDULES)}")
    groups, turns, overlapped = SCHEDULES[name]
    of_groups = [group_tasks(group, head_dim, blocks, softmax_factor, overlapped) for group in range(groups)]
    tasks = [task for tasks in of_groups for task in tasks]
    left = {id(task): task.work for task in tasks}
    waiting, now = list(tasks), 0.0
    done = []
    while waiting:
        for task in waiting:
            if task.ready > now and all(before.end <= now for before in task.after):
                task.ready = now
        rates = []
        for unit in ("matrix", "softmax"):
            asking = [task for task in waiting if task.unit == unit and task.ready <= now]
            if asking and unit == "matrix" and turns:
                asking = [min(asking, key=lambda task: task.ready)]  # of equals the first in the group's order
            elif unit == "matrix":  # a group's own products run in the order in which it asked for them
                asking = [task for task in asking if task is next(t for t in asking if t.group == task.group)]
            rates += [(task, 1 / len(asking)) for task in asking]
        step = min(left[id(task)] / rate for task, rate in rates)
        now += step
        for task, rate in rates:
            task.begin = min(task.begin, now - step)
            left[id(task)] -= step * rate
            if left[id(task)] < 1e-6:
                task.end = now
                waiting.remove(task)
                done.append(task)
    return done


def group_tasks(group: int, head_dim: int, blocks: int, softmax_factor: float, overlapped: bool) -> list[Task]:
    """What one group does, and what each piece of it waits for."""
    product = 2 * GROUP_ROWS * KEY_ROWS * head_dim / FLOPS_PER_CYCLE
    softmax = GROUP_ROWS * KEY_ROWS / EXPS_PER_CYCLE * softmax_factor
    scores = [Task(group, "S", block, product) for block in range(blocks)]
    weights = [Task(group, "softmax", block, softmax) for block in range(blocks)]
    outputs = [Task(group, "O", block, product) for block in range(blocks)]
    for block in range(blocks):
        weights[block].after = [scores[block]]
        outputs[block].after = [weights[block], *outputs[max(0, block - 1) : block]]
        if block > 0 and overlapped:
            scores[block].after = [weights[block - 1], *outputs[max(0, block - 2) : block - 1]]
        elif block > 0:
            scores[block].after = [outputs[block - 1]]
    if not overlapped:
        return [task for block in range(blocks) for task in (scores[block], weights[block], outputs[block])]
    order = [scores[0], weights[0]]
    for block in range(1, blocks):
        order += [scores[block], outputs[block - 1], weights[block]]
    return [*order, outputs[-1]]


def busy(tasks: list[Task], unit: str = "matrix") -> float:
    """The share of the time in which a unit works, from the first task's begin to the last one's end."""
    return sum(task.work for task in tasks if task.unit == unit) / max(task.end for task in tasks)


@styled
def draw_timelines(head_dim: int = 128, softmax_factor=SOFTMAX_FACTOR, cycles: int = 5600, names=DRAWN):
    """The schedules below each other, over the first `cycles` cycles; how busy the matrix units are in the long run."""
    figure, axes = new_figure(10.5, 1.62 * len(names) + 0.9, rows=len(names), columns=1, sharex=True, squeeze=False)
    for row, (axis, name) in enumerate(zip(axes[:, 0], names)):
        tasks = run_schedule(name, head_dim, softmax_factor=softmax_factor)
        for task in tasks:
            if task.begin < cycles:
                draw_task(axis, task, cycles)
        axis.set_title(f"{name}: matrix units busy {100 * busy(tasks):.0f} %", fontsize=12)
        axis.set(ylim=(-1.25, 1.1), xlim=(0, cycles))
        axis.set_yticks([0.5, -0.6], ["matrix units", "softmax"])
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        axis.spines["left"].set_visible(False)
        if row + 1 == len(names):
            axis.set_xlabel(f"cycles; a bar is {GROUP_ROWS} queries × {KEY_ROWS} keys, head dimension {head_dim}")
    handles = [
        Patch(color=COLORS[group, unit], label=f"group {group}: {text}")
        for group in (0, 1)
        for unit, text in (("matrix", "S and O"), ("softmax", "softmax"))
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def draw_task(axis, task: Task, cycles: int) -> None:
    """One bar, in its group's lane of its unit's row, with the block's number."""
    lane = (0.52 if task.group == 0 else 0.02) - (1.1 if task.unit == "softmax" else 0.0)
    end = min(task.end, cycles)
    color = COLORS[task.group, task.unit]
    width = end - task.begin
    axis.barh(lane + 0.22, width, left=task.begin, height=0.44, color=color, edgecolor="white", linewidth=1.2)
    if width > 0.035 * cycles:
        text = f"{'' if task.what == 'softmax' else task.what}{task.block}"
        ink = "white" if color == BLUE else INK
        axis.text((task.begin + end) / 2, lane + 0.21, text, ha="center", va="center", color=ink, fontsize=9)
