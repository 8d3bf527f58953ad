"""Exercise 17.3: attention with a window, by a kernel whose loop is bounded on both sides."""

import math
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import contiguous, unit_last
from course_lib.checker.specification.requirements import Requirement
from exercises.ch17_not_every_key.window_slips import BLOCK, WINDOW, between
from exercises.topics import attention as forms
from exercises.topics import attention_steps as steps
from exercises.topics.attention_inputs import WITH_16_BITS, fits, ordinary
from exercises.topics.attention_steps import accumulated, divided, scored
from exercises.topics.pointers import load, put
from exercises.topics.pytorch_operations import ARITHMETIC
from exercises.topics.running import start

INF, NAN = math.inf, math.nan


def counting_lines(functions, query, key, value, window):
    """The call; in the interpreter it notes how many lines of the cell ran. Its source alone is sent to the worker."""
    import inspect
    import sys

    attend, lines = functions["window_attention"], [0]
    cell = inspect.unwrap(attend).__code__.co_filename

    def in_the_cell(frame, event, argument):
        lines[0] += event == "line"
        return in_the_cell

    if functions.listen is not None:
        sys.settrace(lambda frame, event, argument: in_the_cell if frame.f_code.co_filename == cell else None)
    try:
        return attend(query, key, value, window)
    finally:
        sys.settrace(None)
        functions.noted["lines"] = lines[0]


@dataclass(frozen=True)
class BoundedLoop(Requirement):
    """For one query, six steps over tiles of 16 keys run 220 lines or so; two lines for each tile of 128 are 512."""

    id: str = "loop_not_bounded"

    def complaint(self, case, seen):
        if seen.noted.get("lines", 0) <= 450:
            return None
        return (
            f"{seen.noted['lines']:,} lines of the cell ran for one query and a window of {case.args[3]} keys. A loop "
            "that tests every tile saves loads but still takes a step for each: begin it at the window's first tile."
        )


def window_attention(query, key, value, window):
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    sequence, head = torch.arange(batch)[:, None, None, None], torch.arange(query_heads)[:, None, None]
    key_head = head // (query_heads // key_heads)
    first_query = torch.arange(-(-query_length // BLOCK))[:, None, None, None] * BLOCK  # [tiles, 1, 1, 1]
    rows = (first_query + torch.arange(BLOCK))[..., None]  # [tiles, 1, 1, BLOCK, 1]
    positions = rows + key_length - query_length
    columns, inside = torch.arange(head_dim), rows < query_length
    query_rows = sequence * query.stride(0) + head * query.stride(1) + rows * query.stride(2)
    query_tile = load(query, query_rows + columns, inside)  # [tiles, batch, query_heads, BLOCK, head_dim]
    state = (*start(query_tile.shape[:-1]), torch.zeros(query_tile.shape))
    end = torch.minimum(torch.tensor(key_length), first_query + BLOCK + key_length - query_length)
    begin = (first_query + key_length - query_length - window + 1).clamp(min=0) // BLOCK * BLOCK
    for first_key in range(min(begin.flatten().tolist(), default=0), max(end.flatten().tolist(), default=0), BLOCK):
        keys = (first_key + torch.arange(BLOCK))[:, None]
        present = keys < key_length
        key_rows = sequence * key.stride(0) + key_head * key.stride(1) + keys * key.stride(2)
        value_rows = sequence * value.stride(0) + key_head * value.stride(1) + keys * value.stride(2)
        key_tile, value_tile = load(key, key_rows + columns, present), load(value, value_rows + columns, present)
        keys = keys.mT
        visible = (keys < key_length) & (keys <= positions) & (keys > positions - window)
        scores = scored(query_tile, key_tile, head_dim**-0.5)
        walks = (begin <= first_key) & (first_key < end)
        state = accumulated(scores, visible, value_tile, *state, walks)
    output = torch.full(query.shape, NAN, dtype=query.dtype)
    output_rows = sequence * output.stride(0) + head * output.stride(1) + rows * output.stride(2)
    put(output, output_rows + columns, divided(state[2], state[1]), inside)
    return output


def with_a_window(computed):
    """This computation of attention, with the window as a mask; what no query sees is cut off first."""

    def result(query, key, value, window):
        first = max(0, key.shape[2] - query.shape[2] - window + 1)
        heads = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
        keys, values = key[:, heads, first:], value[:, heads, first:]
        behind = torch.arange(query.shape[2])[:, None] + keys.shape[2] - query.shape[2] - torch.arange(keys.shape[2])
        return computed(query, keys, values, (behind >= 0) & (behind < window))

    return result


def made(
    draw, *, query_length, more=0, window, batch=1, key_heads=1, group=1, head_dim=16, dtype=torch.float32,
    scores=ordinary, rubbish=None, query_layout=contiguous, key_layout=contiguous, value_layout=contiguous,
):  # fmt: skip
    """The arguments. `rubbish` stands in the tiles of 64 keys that no query sees."""
    given = scores(draw, batch * key_heads * group, query_length, query_length + more, head_dim)
    query, key, value = (part.view(batch, key_heads, group, -1, head_dim).to(dtype) for part in given)
    unseen = max(0, more - window + 1) // BLOCK * BLOCK
    for part in (key, value):
        part[..., :unseen, :] = part[..., :unseen, :] if rubbish is None else rubbish
    key, value = key[:, :, 0], value[:, :, 0]
    return query_layout(draw, query.flatten(1, 2)), key_layout(draw, key), value_layout(draw, value), window


def far_below(draw, heads, query_length, key_length, head_dim):
    """Scores below any number that stands for minus infinity: key j has -1e32 · (key_length - j)."""
    key = -1e16 / math.sqrt(head_dim) * torch.arange(key_length, 0.0, -1.0).view(-1, 1).repeat(heads, 1, head_dim)
    return torch.full((heads, query_length, head_dim), 1e16), key, draw.normal(heads, key_length, head_dim)


def equal(draw, heads, query_length, key_length, head_dim):
    """Equal scores, and values of which 64 add up to more than float16 holds."""
    query, key = torch.zeros(heads, query_length, head_dim), draw.normal(heads, key_length, head_dim)
    return query, key, 1500 + draw.normal(heads, key_length, head_dim)


def window_cases(draw):
    def case(name, metered=False, driver=None, **choices):
        return Case(name, made(draw, **choices), metered=metered, driver=driver)

    return [
        case("64 queries and keys, a window of 16", query_length=64, window=16),
        case("a window of 1: each query sees itself", query_length=64, window=1),
        case("a window wider than the keys: plain causal attention", query_length=70, window=1000),
        case("one query at the end of 200 keys, a window of 70", query_length=1, more=199, window=70),
        case("two sequences, 4 query heads on 2", batch=2, key_heads=2, group=2, query_length=40, more=30, window=33),
        case("NaN in the tiles that no query sees", query_length=10, more=190, window=20, rubbish=NAN),
        case("300 queries, 1,000 keys, a window of 600", query_length=300, more=700, window=600),
        case("float16, values near 1,500", query_length=64, window=64, dtype=torch.float16, scores=equal),
        case("scores near -1e32", query_length=64, more=64, window=80, scores=far_below),
        case("float16, 65 queries", query_length=65, more=64, window=66, dtype=torch.float16),
        case("bytes counted, a window of 70", True, query_length=128, more=384, window=70, group=2),
        case("bytes counted, a window of 65", True, query_length=64, more=256, window=65, head_dim=32),
        case("one query and 32,768 keys, lines counted", driver=counting_lines, query_length=1, more=32767, window=70),
    ]


CONTRACT = Contract(
    made,
    choices={
        "batch": (1, 2), "key_heads": (1, 2), "group": (1, 3), "scores": WITH_16_BITS,
        "query_length": (1, 2, 63, 64, 65, 131), "more": (0, 1, 37, 64, 200),
        "window": (1, 2, 63, 64, 65, 129, 1000), "head_dim": (16, 32, 128), "dtype": (torch.float32, torch.float16),
        "rubbish": (Level(None, ""), Level(NAN, "NaN where no query sees"), Level(INF, "inf where no query sees")),
        "query_layout": unit_last("query"), "key_layout": unit_last("key"), "value_layout": unit_last("value"),
    },
    says={
        "group": "a multiple of key_heads", "query_length": "query_length from 1", "more": "at most key_length",
        "window": "window: from 1", "head_dim": "head_dim 16, 32, 64 or 128", "dtype": "float32 or float16",
        "scores": "Numbers of any size", "rubbish": "may hold anything, NaN too",
        "key_layout": "any strides but the last, which is 1",
    },
    valid=lambda batch, key_heads, group, query_length, more, head_dim, dtype, scores, **others: fits(dtype, scores)
    and batch * key_heads * group * -(-query_length // BLOCK) * (query_length + more) * head_dim < 2**15,
    most=12,
)  # fmt: skip


def window_bytes(query, key, value, window):
    """Q and O once, and for each 64 queries of a head the tiles of 64 keys that one of them sees."""
    rows, keys = query.shape[2], key.shape[2]
    for first in range(keys - query.shape[2], keys, BLOCK):
        rows += min(keys, -(-(first + BLOCK) // BLOCK) * BLOCK) - max(0, first - window + 1) // BLOCK * BLOCK
    return 2 * query[..., 0, 0].numel() * rows * query.shape[3] * query.element_size()


CHANGES = (
    *WINDOW, *edits("", unguarded=(steps.DIVISOR, "running_sum")), *without(steps.SCALE, "scale_twice"),
    *steps.BASE_2, *steps.MIXED_BASES, *steps.NARROW, *steps.HIDDEN, *steps.FINISHED, *steps.STEP,
)  # fmt: skip

EXERCISE = Exercise(
    id="17.3", title="A kernel with a bounded loop", entries=("window_attention",), cases=window_cases,
    oracle=with_a_window(forms.in_a_kernel), contracts=(CONTRACT,),
    plain=tuple(with_a_window(getattr(forms, f"{how}_in_a_kernel")) for how in ("prescaled", "rounded", "normalised")),
    models=(model_of(window_attention, CHANGES, (start, scored, accumulated, divided), (between,), most_pairs=30),),
    needs=TRITON, uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1), Moves(window_bytes, slack=1.1), ReadByKernels((1, 2)), BoundedLoop(),
        Allocates(lambda query, key, value, window: max(query.numel(), key.numel())),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "_softmax", *ARITHMETIC)),
    ),
    hints=(
        "Draw a tile of 64 queries, and the keys that its first and last query see: they give both ends of the loop.",
        "begin = tl.maximum(0, first_query + key_length - query_length - window + 1) // BLOCK_N * BLOCK_N.",
        "A score counts where (keys <= positions) & (keys > positions - window) & (keys < key_length). The last rows "
        "of a tile may see no key of the first tile of keys, so new_max can be -inf: subtract 0 there.",
        "The grid is (tiles of queries, query_heads, batch); key_head = head // GROUP. Pass three strides a tensor.",
    ),
)  # fmt: skip
