"""Small exercises for the checker's own tests, so that these do not depend on any chapter."""

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Exercise,
    Forbids,
    InOut,
    LaunchesTriton,
    Limits,
    Mistake,
    Moves,
    Slip,
)

QUICK = Limits(seconds=4.0, memory_bytes=256 << 20)
ENDLESS = Limits(seconds=2.0, memory_bytes=256 << 20)  # for answers that are waited for in vain


def _vectors(draw):
    for length in (1, 127, 1000, 1025):
        yield Case(f"{length} elements", (draw.normal(length), draw.normal(length)), metered=True)
    yield Case("every second element of x", (draw.strided(draw.normal(100)), draw.normal(100)))


ADD = Exercise(
    id="90.1",
    title="Vector add",
    entries=("add",),
    cases=_vectors,
    oracle=lambda x, y: x + y,
    needs=TRITON,
    limits=QUICK,
    slips=(
        Slip("subtracts", "You subtract.", formula=lambda x, y: x - y),
        Slip("adds_one", "You add one.", formula=lambda x, y: x + y + 1),
    ),
    mistakes=(
        Mistake(
            "tail_not_masked", "The last block has no mask.", when=lambda case, seen, got: bool(seen.out_of_bounds)
        ),
    ),
    requirements=(LaunchesTriton(at_most=1), Moves(lambda x, y: 12 * x.numel()), Forbids(("add",))),
    hints=("first", "second"),
)

ADD_CELL = """# Exercise 90.1 · Vector add
@triton.jit
def kernel(x, y, out, length, x_stride, y_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    total = tl.load(x + i * x_stride, mask=mask) + tl.load(y + i * y_stride, mask=mask)
    tl.store(out + i, total, mask=mask)


def add(x, y):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(x.numel(), 512),)](x, y, out, x.numel(), x.stride(0), y.stride(0), BLOCK=512)
    return out
"""

DOUBLE = Exercise(
    id="90.2",
    title="Double",
    entries=("double",),
    limits=QUICK,
    oracle=lambda x: 2 * x,
    cases=lambda draw: [Case("seven elements", (draw.normal(7),)), Case("a matrix", (draw.normal(5, 40),))],
    requirements=(Allocates(lambda x: x.numel()),),
)


def _appended(cache, row, position):
    cache[position] = row
    return None


APPEND = Exercise(
    id="90.3",
    title="Append in place",
    entries=("append",),
    limits=QUICK,
    oracle=_appended,
    cases=lambda draw: [Case("in the middle", (InOut(draw.normal(6, 4)), draw.normal(4), 3))],
    slips=(
        Slip(
            "one_too_far",
            "The position counts from zero.",
            formula=lambda cache, row, position: _appended(cache, row, position + 1),
        ),
    ),
)


def _drive_counter(functions, steps):
    counter = functions["Counter"]()
    return [counter.step() for _ in range(steps)]


COUNTER = Exercise(
    id="90.4",
    title="A class",
    entries=("Counter",),
    limits=QUICK,
    oracle=lambda steps: list(range(1, steps + 1)),
    cases=lambda draw: [Case("five steps", (5,), driver=_drive_counter)],
)

TWO = Exercise(
    id="90.5",
    title="Two functions",
    entries=("flops", "moved"),
    limits=QUICK,
    oracle={"flops": lambda n: 2 * n**3, "moved": lambda n: 12 * n**2},
    cases=lambda draw: [Case("flops of 8", (8,)), Case("bytes of 8", (8,), entry="moved")],
)

HALF = Exercise(
    id="90.6",
    title="Row sum in half precision",
    entries=("row_sum",),
    limits=QUICK,
    oracle=lambda x: x.sum(-1),
    cases=lambda draw: [Case("fp16", (draw.normal(3, 1000, dtype=torch.float16),))],
)

ALL = {task.id: task for task in (ADD, DOUBLE, APPEND, COUNTER, TWO, HALF)}
