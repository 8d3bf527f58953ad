"""`python -m course_lib bench layer`: one Llama-3-8B layer, part by part, before fusion and after.

    eager     what PyTorch makes of each part, an operation for a kernel
    compiled  the same by torch.compile
    ours      the course's kernels

16,384 tokens in four sequences, bf16. The glue is what stands between the matrix products and attention: add and norm,
rotary positions with the append to the cache, SwiGLU. Of it, the bytes that eager PyTorch moves are counted operation
by operation, each tensor at its own size; those of one kernel are the inputs and the results, once. The matrix products
are PyTorch's in every column, and attention is PyTorch's fused one or the course's. All forms of a part are timed in
turns, as in `bench fused`; the layer is the sum of its parts. Figures go to layer.json in the bench folder.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.bench._record import clocks, write_record
from course_lib.bench.fused import (
    CHECKED_ROWS,
    Problem,
    add_and_norm,
    measure_problem,
    random,
    rope_into_caches,
    swiglu_product,
)
from course_lib.bench.softmax import copy_bandwidth
from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth, format_flop_rate
from course_lib.kernels.attention.operator import attention

BATCH, TOKENS, HIDDEN, INTERMEDIATE, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 4, 4096, 4096, 14_336, 32, 8, 128
ROWS = BATCH * TOKENS
COLUMNS = {"eager": "eager", "compiled": "torch.compile", "ours": "ours"}  # in `bench fused`
PRODUCT = 8192  # side of the matrix product that says what the matrix units reach


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the layer.

    Attributes:
        name: of the part.
        times: how often a layer runs it.
        make: its Problem, made when it is its turn.
        flops: of one run; a multiply-add counts as two, an exponential or a division as one.
        glue: whether it is neither a matrix product nor attention.
    """

    name: str
    times: int
    make: Callable[[], Problem]
    flops: float
    glue: bool = True


def product(inner: int, outer: int) -> Problem:
    x, weight = random(ROWS, inner), random(outer, inner)
    weight /= math.sqrt(inner)
    exact = (F.linear(x[:CHECKED_ROWS].double(), weight.double()),)
    return Problem(dict.fromkeys(COLUMNS.values(), lambda: F.linear(x, weight)), exact,
                   x.nbytes + weight.nbytes + ROWS * outer * x.element_size())  # fmt: skip


def causal_attention() -> Problem:
    query = random(BATCH, QUERY_HEADS, TOKENS, HEAD_DIM)
    key, value = (random(BATCH, KEY_HEADS, TOKENS, HEAD_DIM) for _ in "kv")

    def of_pytorch():
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    group = QUERY_HEADS // KEY_HEADS
    exact = []
    for head in range(KEY_HEADS):  # one at a time: the scores of all would be 69 GB in float64
        queries = query[:CHECKED_ROWS, head * group : (head + 1) * group].double()
        keys, values = (tensor[:CHECKED_ROWS, head : head + 1].double().expand_as(queries) for tensor in (key, value))
        exact.append(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))
    forms: dict[str, Callable] = dict.fromkeys(("eager", "torch.compile"), of_pytorch)
    forms["ours"] = lambda: attention(query, key, value, causal=True)
    return Problem(forms, (torch.cat(exact, dim=1),), 2 * (query.nbytes + key.nbytes))


PARTS = (
    Part("add and norm", 2, lambda: add_and_norm(ROWS, HIDDEN), 5.0 * ROWS * HIDDEN),
    Part("Q, K, V", 1, lambda: product(HIDDEN, (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM),
         2.0 * ROWS * HIDDEN * (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM, glue=False),
    Part("RoPE and append", 1, lambda: rope_into_caches(BATCH, TOKENS, QUERY_HEADS, KEY_HEADS, HEAD_DIM),
         3.0 * ROWS * (QUERY_HEADS + KEY_HEADS) * HEAD_DIM),
    Part("attention", 1, causal_attention, 2.0 * BATCH * QUERY_HEADS * TOKENS**2 * HEAD_DIM, glue=False),
    Part("output", 1, lambda: product(HIDDEN, HIDDEN), 2.0 * ROWS * HIDDEN**2, glue=False),
    Part("gate and up", 1, lambda: product(HIDDEN, 2 * INTERMEDIATE), 4.0 * ROWS * HIDDEN * INTERMEDIATE, glue=False),
    Part("SwiGLU", 1, lambda: swiglu_product(ROWS, INTERMEDIATE), 5.0 * ROWS * INTERMEDIATE),
    Part("down", 1, lambda: product(INTERMEDIATE, HIDDEN), 2.0 * ROWS * HIDDEN * INTERMEDIATE, glue=False),
)  # fmt: skip


class _Moved(TorchDispatchMode):
    """Counts the bytes of the tensors that operations read and write; a view moves none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **(named or {}))
        schema = operation._schema
        if operation.is_view or "empty" in schema.name or "reshape_alias" in schema.name:
            return result
        read = [value for value in torch.utils._pytree.tree_leaves((arguments, named)) if torch.is_tensor(value)]
        if schema.name == "aten::copy_":
            read = read[1:]  # the first is the target
        made = [value for value in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(value)]
        self.bytes += sum(_own_bytes(tensor) for tensor in (*read, *made))
        return result


def _own_bytes(tensor: torch.Tensor) -> int:
    """A broadcast tensor counts once."""
    numbers = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return numbers * tensor.element_size()


def moved_bytes(function: Callable) -> int:
    """Bytes that the operations of a call read and write, each tensor at its own size."""
    with _Moved() as mode:
        function()
    return mode.bytes


def matmul_rate() -> float:
    one, other = random(PRODUCT, PRODUCT), random(PRODUCT, PRODUCT)
    return measure(lambda: one @ other).rate(2 * PRODUCT**3)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    if machine().tier == "none":
        print("bench layer needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, copy, rate = clocks(), copy_bandwidth(), matmul_rate()
    print(f"copy {format_bandwidth(copy)}, a product of {PRODUCT} × {PRODUCT} {format_flop_rate(rate)}")
    print(f"{'µs':<20}" + "".join(f"{name:>10}" for name in COLUMNS) + f"{'MB eager':>12}{'MB at least':>12}")
    parts: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        problem = part.make()
        forms = {name: problem.forms[column] for name, column in COLUMNS.items()}
        eager_bytes = moved_bytes(forms["eager"]) if part.glue else problem.bytes
        timed = measure_problem(dataclasses.replace(problem, forms=forms), copy)
        parts[part.name] = {"times": part.times, "flops": part.flops, "glue": part.glue, "bytes": problem.bytes,
                            "eager_bytes": eager_bytes, "us": {name: timed[name].get("us") for name in COLUMNS},
                            "missing": {n: it["missing"] for n, it in timed.items() if "missing" in it}}  # fmt: skip
        figures = "".join(f"{us:10.1f}" if us else f"{'–':>10}" for us in parts[part.name]["us"].values())
        print(f"{part.name:<20}{figures}{eager_bytes / 1e6:12.0f}{problem.bytes / 1e6:12.0f}", flush=True)
        del problem, forms
        torch.cuda.empty_cache()
    for title, chosen in (("the glue", [it for it in parts.values() if it["glue"]]), ("the layer", parts.values())):
        sums = [sum(it["times"] * (it["us"][name] or math.nan) for it in chosen) for name in COLUMNS]
        print(f"{title:<20}" + "".join(f"{us:10.1f}" for us in sums))
    write_record("layer", before, copy=copy, matmul_rate=rate, tokens=ROWS, parts=parts)
    return 0
