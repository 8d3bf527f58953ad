"""Exercise 16.8: the product for few rows, as a Triton kernel that reads the weight once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Case, Exercise, FasterThan, Forbids, LaunchesTriton, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, beyond_32_bits, expanded, gaps
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS, ReadByKernels, Requirement
from exercises.topics.evidence import first_access
from exercises.topics.pointers import load
from exercises.topics.pytorch_operations import ARITHMETIC

SOME_NUMBERS, MOST_PROGRAMS, MOST_PARTS = 4096, 64, 64
SPEED = 0.6  # of torch's own product


def few_rows(x, weight):
    row, column = torch.arange(x.shape[0])[:, None], torch.arange(weight.shape[0])[:, None]
    inner = torch.arange(x.shape[1])
    left = load(x, row * x.stride(0) + inner)
    right = load(weight, column * weight.stride(0) + inner)
    return (left.float() @ right.float().mT).to(x.dtype)


def product(x, weight):
    return x @ weight.mT


@dataclass(frozen=True)
class WeightOnce(Requirement):
    """In metered cases no number of the weight is loaded twice, and nothing crosses beside what the statement lists."""

    id: str = "too_many_bytes"

    def complaint(self, case, seen):
        if not (case.metered and seen.traffic):
            return None
        (x, weight), rows = case.args, seen.traffic.values()
        once, numbers = 2 * weight.numel(), x.shape[0] * weight.shape[0]
        loaded = max((row["loaded"] for row in rows if row["distinct_loaded"] == once), default=0)
        if loaded > once:
            return (
                f"The weight has {once:,} bytes, and {loaded:,} were loaded of it: each number {loaded / once:.2f} "
                "times. One program takes all rows of x, so that it uses what it loads of the weight for all of them."
            )
        parts = max(max(row["stored"], row["atomic"]) for row in rows) / (4 * numbers)
        if parts > MOST_PARTS:
            return f"{parts:.0f} parts were stored or added, and {MOST_PARTS} may be. They are many for a wide weight."
        crossing = sum(row["distinct_loaded"] + row["stored"] + 2 * row["atomic"] for row in rows)
        allowed = once + 2 * (x.numel() + numbers) + 8 * MOST_PARTS * numbers
        if crossing > 1.05 * allowed:
            return f"{crossing:,} bytes moved, and {allowed:,} may: the weight, x, the result and {MOST_PARTS} parts."
        return None


@dataclass(frozen=True)
class ManyPrograms(Requirement):
    """The largest launch fills the card."""

    id: str = "too_few_programs"

    def complaint(self, case, seen):
        weight = case.args[1]
        asked = min(MOST_PROGRAMS, weight.numel() // SOME_NUMBERS)
        if not seen.launches or seen.largest_grid >= asked:
            return None
        return (
            f"For a weight of {weight.shape[0]} × {weight.shape[1]} the largest launch has {seen.largest_grid} "
            f"programs, and {asked} are required. Cut the width into parts, each with programs of its own."
        )


def operands(draw, rows, out, width, dtype=torch.float16, size=1.0):
    return draw.normal(rows, width, scale=size).to(dtype), draw.normal(out, width, scale=width**-0.5).to(dtype)


def _up_and_down(draw):
    """Sums that rise to 1,000, where float16 keeps halves, and come back to about 0."""
    level = torch.where(torch.arange(512) < 256, 2000.0, -2000.0)
    weight = (level + draw.normal(20, 512, scale=15.0).round()).to(torch.float16)
    return torch.full((3, 512), 2.0**-9, dtype=torch.float16), weight


def few_rows_cases(draw):
    ragged, last = draw.choice((201, 331, 457)), operands(draw, 3, 3, 20)
    cases = [
        Case("2 rows, a weight of 130 × 2200", operands(draw, 2, 130, 2200), metered=True),
        Case("1 row, a weight of 5 × 8900", operands(draw, 1, 5, 8900), metered=True),
        Case("16 rows, a weight of 64 × 128", operands(draw, 16, 64, 128), metered=True),
        Case("17 rows, a weight of 33 × 130", operands(draw, 17, 33, 130)),
        Case(f"40 rows, a weight of 50 × {ragged}", operands(draw, 40, 50, ragged), metered=True),
        Case("64 rows, a weight of 100 × 520", operands(draw, 64, 100, 520), metered=True),
        Case("3 rows; the sums rise to 1,000 and fall to 0", _up_and_down(draw)),
        Case("5 rows, gaps after the rows of x",
            (gaps(draw, draw.normal(5, 90).half()), draw.normal(40, 90, scale=0.1).half())),
        *beyond_32_bits(draw, "rows of the weight", last[1:], before=last[:1]),
    ]  # fmt: skip
    if draw.bfloat16:
        cases.append(Case("bfloat16, 9 rows, a weight of 576 × 1536", operands(draw, 9, 576, 1536, torch.bfloat16)))
    if draw.on_gpu:
        cases.append(Case("8 rows, a weight of 2048 × 16384", operands(draw, 8, 2048, 16384), timed=True))
    return cases


def drawn_operands(draw, rows, out, width, size, x_rows, weight_rows):
    x, weight = operands(draw, rows, out, width, size=size)
    return x_rows(draw, x), weight_rows(draw, weight)


CONTRACT = Contract(
    drawn_operands,
    choices={
        **{"rows": (1, 2, 15, 17, 33, 64), "out": (1, 16, 31, 65), "width": (1, 15, 64, 129, 300)},
        "size": (Level(1.0, ""), Level(256.0, "large values")),
        "x_rows": (CONTIGUOUS, Level(gaps, "x with gaps"), Level(expanded, "x expanded over dimension 0")),
        "weight_rows": (CONTIGUOUS, Level(gaps, "weight with gaps")),
    },
    says={"rows": "rows 1 to 64", "out": "out and width are any sizes from 1", "x_rows": "number of elements apart"},
    most=8,
)


@functools.lru_cache(maxsize=64)
def _counted(case, got):
    """How often each column of the width was counted, or 16 together; None where that does not explain a result."""
    x, weight = (tensor.double() for tensor in case.args)
    if got.shape != (x.shape[0], weight.shape[0]) or not bool(got.isfinite().all()):
        return None
    of_columns = (x[:, None] * weight).flatten(0, 1)  # [rows · out, width]
    equations = len(x.unique(dim=0)) * len(weight)  # equal rows of x say the same
    if equations < 1.5 * x.shape[1]:  # too few for each column by itself
        of_columns = torch.stack([part.sum(1) for part in of_columns.split(16, 1)], 1)
    if equations < 1.5 * of_columns.shape[1] or of_columns.shape[1] < 2:
        return None
    times = torch.linalg.lstsq(of_columns, got.double().cpu().flatten()[:, None]).solution[:, 0].round()
    near = torch.allclose(of_columns @ times, got.double().cpu().flatten(), rtol=2e-2, atol=2e-2)
    return times if near and bool((times != 1).any()) else None


def counted(condition):
    """A `when`: the columns were counted so often, and the answer says so itself."""

    def when(case, seen, got):
        times = None if seen.out_of_bounds or seen.unwritten else _counted(case, got)
        return times is not None and bool(condition(times))

    return when


def left_out(axis):
    """A `when`: nothing was computed of the last rows (axis 0) or columns of the result, and the others are right."""

    def when(case, seen, got):
        right = product(*(tensor.double() for tensor in case.args))
        wrong = ~torch.isclose(got.double().cpu(), right, 2e-2, 2e-2)
        lines, first = wrong.any(1 - axis), int(wrong.any(1 - axis).int().argmax())
        nothing = seen.unwritten or bool(((got.cpu() == 0) | ~got.cpu().isfinite())[wrong].all())
        empty = nothing and not seen.out_of_bounds
        return bool(empty and first and first % 16 == 0 and lines[first:].all() and 2 * wrong.sum() > lines.sum())

    return when


def _rounded_on_the_way(case, seen, got):
    """Whether a result is about right, and some number of it is further off than one rounding makes it."""
    right = product(*(tensor.double() for tensor in case.args))
    size = product(*(tensor.double().abs() for tensor in case.args))
    error = (got.double().cpu() - right).abs()
    off = error > torch.finfo(got.dtype).eps * right.abs() + 1e-5 * size
    return bool(off.any() and (error <= 1e-2 * size).all())


START = "Some of the width was used again and again. Add the block's start to the positions in both operands."
X_STRIDE = "The rows of x were read as if they had no gap between them. They lie x.stride(0) elements apart."
BLOCKS = (16, 32, 64, 128, 256)
CHANGES = (
    *edits(START, **{f"start_forgotten__x_{n}": ("x.stride(0) + inner", f"x.stride(0) + inner % {n}") for n in BLOCKS},
        **{f"start_forgotten__w_{n}": ("weight.stride(0) + inner", f"weight.stride(0) + inner % {n}") for n in BLOCKS}),
    *edits(X_STRIDE, x_stride_ignored=("x.stride(0)", "x.shape[1]")),
    *edits("The rows of the weight were read as if they had no gap between them. They lie weight.stride(0) elements "
        "apart.", weight_stride_ignored=("weight.stride(0)", "x.shape[1]")),
    *edits("The rows of one operand were read with the other's stride. Each has its own.",
        strides_exchanged=("weight.stride(0)", "x.stride(0)"), strides_exchanged__x=("x.stride(0)", "weight.stride(0)"),
        strides_exchanged__both=("weight.stride(0)", "x.stride(0)", "x.stride(0)", "weight.stride(0)")),
    *edits("The result was stored column after column. It is [rows, out]: element (r, c) lies at r · out + c.",
        stored_transposed=("(left.float() @ right.float().mT)",
        "(left.float() @ right.float().mT).mT.contiguous().view(x.shape[0], weight.shape[0])")),
)  # fmt: skip


EXERCISE = Exercise(
    id="16.8", title="A product for few rows", entries=("few_rows",), cases=few_rows_cases, oracle=product,
    contracts=(CONTRACT,), models=(model_of(few_rows, CHANGES),), needs=TRITON, uses_dot=True,
    requirements=(
        LaunchesTriton(), Forbids((*MATRIX_PRODUCTS, *ARITHMETIC, "einsum", "dot")), ReadByKernels((0, 1)),
        WeightOnce(), ManyPrograms(),
        FasterThan(product, SPEED, lambda x, weight: x.element_size() * weight.numel()),
    ),
    mistakes=(
        Mistake("rows_dropped", "Rows beyond the first 16 or 32 were not computed. Give the tile as many rows as x, "
            "max(16, triton.next_power_of_2(rows)).", when=left_out(0), every=True),
        Mistake("columns_dropped", "The last outputs were not computed. Count their tiles by triton.cdiv(out, BLOCK_N) "
            "and begin a tile at its program's number times BLOCK_N.", when=left_out(1), every=True),
        Mistake("last_numbers_unwritten", "The last numbers of the result, counted row after row, were never written. "
            "The kernel that adds the parts takes a block of them in a program: round the number of blocks up, with "
            "triton.cdiv, and mask.", when=lambda case, seen, got: seen.unwritten and not seen.out_of_bounds
            and got.isfinite().flatten().int().diff().unique().tolist() == [-1, 0]),
        Mistake("one_block_of_a_part", "Of the blocks of a part only one was counted, the first or the last. Add each "
            "block's product to a sum that begins before the loop, and let the loop go on to the part's end.",
            when=counted(lambda times: (times <= 1).all() and int((times.diff() < 0).sum() + (times[0] == 0)) > 1)),
        Mistake("parts_overwritten", "One part of the width is the whole result. Were the parts stored in one place, "
            "where the last one stays, or was only one added? Each part needs its own place in the workspace, or an "
            "atomic addition.", when=counted(lambda times: (times <= 1).all() and 0 < 2 * times.sum() <= len(times))),
        Mistake("last_columns_lost", "The last columns of the width were not counted. Where the width is no multiple "
            "of the parts or of the block, the last part is shorter: round up, and mask.",
            when=counted(lambda times: times[-1] == 0 and (times <= 1).all())),
        Mistake("start_forgotten", START, when=counted(lambda times: (times == 0).any() and (times > 1).any())),
        Mistake("columns_counted_twice", "Some columns of the width were counted more than once. Mask the last block "
            "of a part with the part's end.", when=counted(lambda times: (times > 1).any())),
        Mistake("not_cleared", "Parts were added to memory that held something else. torch.empty does not fill it: "
            "atomic additions need torch.zeros.", when=lambda case, seen, got: not seen.out_of_bounds
            and any(row["atomic"] for row in seen.traffic.values()) and not bool(got.isfinite().all())),
        Mistake("writes_outside", "A store reaches past the result or the workspace. Mask it with row < rows and "
            "column < out.", when=first_access("writes")),
        Mistake("reads_outside", "A load reaches past an operand. Mask the rows of x, the rows of the weight and the "
            "width, with other=0.0.", when=first_access("reads", whole=True)),
        Mistake("x_stride_ignored", X_STRIDE, when=lambda case, seen, got: first_access("reads")(case, seen, got)
            and not case.args[0].is_contiguous() and case.args[1].is_contiguous()),
        Mistake("rounded_on_the_way", "The result is only about right. Is a sum or a part kept in 16 bits? Sums and "
            "parts are float32, and the result is rounded once.", when=_rounded_on_the_way, every=True),
    ),
    hints=(
        "A program takes all rows of x, one tile of the weight's rows, and one part of the width. The grid is (tiles, "
        "parts). The number of parts follows from the programs that you want: programs / tiles, but no more than there "
        "are blocks in the width.",
        "Pad the rows to max(16, triton.next_power_of_2(rows)), load the padding as 0, and mask it in the store. The "
        "tile of the weight is loaded as [BLOCK_K, BLOCK_N]: inner[:, None] + column[None, :] * weight_stride.",
        "Part p of `splits` takes the blocks from p * blocks // splits to (p + 1) * blocks // splits, where blocks is "
        "triton.cdiv(width, BLOCK_K). So no part is empty, and none is lost.",
        "Store the part in a float32 workspace [splits, rows, out]. A second kernel adds the parts of each number in a "
        "loop and rounds. Or fill [rows, out] float32 with zeros, use tl.atomic_add, and convert it at the end.",
    ),
)  # fmt: skip
