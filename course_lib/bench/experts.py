"""`python -m course_lib bench experts`: a mixture of experts, beside PyTorch's grouped product and a loop with cuBLAS.

    product     each row with its expert's weight: 128 experts of 2048 × 1536 and 65,536 rows, 8 of each of 8192 tokens.
                PyTorch's forms get their rows sorted beforehand, outside the time; ours read the tokens where they lie
    block       the experts' feed-forward block of Qwen3-30B-A3B, 128 experts with 768 hidden numbers, 8 chosen, for
                8192 tokens: forward, and forward with backward. PyTorch's form sorts the rows within the time
    few tokens  the block for 1, 8 and 64 tokens, as a CUDA graph; its rate is of the bytes of the experts that are met

`main(["tiles"])` measures instead the product, and the gated one of 8 tokens, by each cut that a sweep may try.

Choices are uniform, or skewed: of the same 128 experts the n-th is chosen with a chance that falls as 1 / n. Then most
tokens go to the most popular one, and a loop over experts has one long product and many short ones. 16-bit numbers, all
columns of a row in turns (`measure_together`), the L2 cache flushed before each run. A result that differs from the
first column's by more than its rounding has no figure. Figures go to experts.json in the bench folder.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.bench._record import write_record
from course_lib.bench.attention import clocks
from course_lib.bench.fused import random
from course_lib.bench.large_products import in_turns
from course_lib.hardware.device import machine
from course_lib.hardware.graphs import captured
from course_lib.kernels.experts.arrange import Arrangement, arrange
from course_lib.kernels.experts.grouped import grouped_product
from course_lib.kernels.experts.mlp import expert_mlp
from course_lib.kernels.products.candidates import ProductTiles

EXPERTS, CHOSEN, WIDTH, OUTER, HIDDEN, TOKENS = 128, 8, 2048, 1536, 768, 8192
FEW_TOKENS = (1, 8, 64)
SWEPT = tuple(
    ProductTiles(*cut, group=group)
    for cut in ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4),
                (128, 128, 128, 8, 3), (64, 256, 64, 4, 3), (256, 128, 64, 8, 3))
    for group in (1, 4, 8)
)  # fmt: skip
SWEPT_FOR_FEW = tuple(
    ProductTiles(16, columns, inner, warps=4, stages=stages)
    for columns in (32, 64, 128)
    for inner, stages in ((64, 4), (64, 6), (128, 3), (128, 5), (256, 3))
)


def choices(tokens: int, skewed: bool = False) -> torch.Tensor:
    """Distinct experts for each token, int64 [tokens, CHOSEN], on the GPU."""
    chances = torch.arange(1, EXPERTS + 1, device="cuda").float().reciprocal() if skewed else torch.ones(EXPERTS)
    noise = torch.rand(tokens, EXPERTS, device="cuda").log() / chances.to("cuda")  # the largest of these, chosen so
    return noise.topk(CHOSEN).indices


def sorted_rows(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots in the order of their experts, where each expert's slots end, int32), as `torch._grouped_mm` wants it."""
    key, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(count, device=key.device), right=True)
    return order, ends.to(torch.int32)


def by_grouped_mm(x, gate_up, down, experts, weights) -> torch.Tensor:
    """The experts' block out of PyTorch's operations, without a wait for the host."""
    tokens, k = experts.shape
    order, ends = sorted_rows(experts, len(gate_up))
    gate, up = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, dim=-1)
    rows = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return (rows[back].view(tokens, k, -1) * weights[..., None]).sum(dim=1).to(x.dtype)


def by_loop(rows, weight, ends: list[int]) -> torch.Tensor:
    """A product of cuBLAS for each expert; the host knows where each one's rows end."""
    out = rows.new_empty(len(rows), weight.shape[1])
    begin = 0
    for expert, end in enumerate(ends):
        torch.mm(rows[begin:end], weight[expert].mT, out=out[begin:end])
        begin = end
    return out


def product(skewed: bool, tiles: tuple[ProductTiles, ...] = ()) -> dict[str, dict]:
    """One grouped product for TOKENS tokens; with tiles, ours alone beside `_grouped_mm`, by each of them."""
    x, weight, experts = random(TOKENS, WIDTH), random(EXPERTS, OUTER, WIDTH) * WIDTH**-0.5, choices(TOKENS, skewed)
    order, ends = sorted_rows(experts, EXPERTS)
    rows = x[order // CHOSEN]
    forms: dict[str, Callable] = {"_grouped_mm": lambda: torch._grouped_mm(rows, weight.mT, offs=ends)}
    if not tiles:
        forms["cuBLAS loop"] = functools.partial(by_loop, rows, weight, ends.tolist())
        forms["ours"] = ours(x, weight, arrange(experts, EXPERTS, 128))
    for cut in tiles:
        forms[str(tuple(cut))] = ours(x, weight, arrange(experts, EXPERTS, cut.rows), tiles=cut)
    return in_turns(forms, 2 * TOKENS * CHOSEN * OUTER * WIDTH)


def of_places(form: Callable, arrangement: Arrangement) -> Callable:
    """A form whose first result, which is compared, is the rows that have a slot; from then on it only computes."""
    calls: list[int] = []

    def wrapped() -> torch.Tensor:
        out = form()
        calls.append(1)
        return out if len(calls) > 1 else out[arrangement.slots < arrangement.sentinel]

    return wrapped


def ours(x, weight, arrangement: Arrangement, **options) -> Callable:
    """Our product of the tokens."""
    return of_places(functools.partial(grouped_product, x, weight, arrangement, **options), arrangement)


def block_of(tokens: int, skewed: bool = False) -> tuple[torch.Tensor, ...]:
    """Arguments for the experts' block."""
    gate_up = random(EXPERTS, 2 * HIDDEN, WIDTH) * WIDTH**-0.5
    down = random(EXPERTS, WIDTH, HIDDEN) * HIDDEN**-0.5
    weights = torch.rand(tokens, CHOSEN, device="cuda").softmax(dim=-1)
    return random(tokens, WIDTH), gate_up, down, choices(tokens, skewed), weights


def block(skewed: bool, backward: bool) -> dict[str, dict]:
    """The whole block; a training step counts three times the forward's FLOPs, whatever is computed again."""
    arguments = block_of(TOKENS, skewed)
    leaves = [arguments[n].requires_grad_(backward) for n in (0, 1, 2, 4)]
    gradient = random(TOKENS, WIDTH)

    def form(function: Callable) -> Callable:
        if not backward:
            return lambda: function(*arguments)
        return lambda: torch.autograd.grad(function(*arguments), leaves, gradient)[0]

    forms = {"_grouped_mm": form(by_grouped_mm), "ours": form(expert_mlp)}
    return in_turns(forms, (18 if backward else 6) * TOKENS * CHOSEN * WIDTH * HIDDEN)


def few(tokens: int) -> dict[str, dict]:
    """The block for a decode step; "bytes" are those of the experts that are met."""
    arguments = block_of(tokens)
    met = arguments[3].unique().numel()
    forms = {"_grouped_mm": as_graph(by_grouped_mm, arguments), "ours": as_graph(expert_mlp, arguments)}
    results = in_turns(forms, 6 * tokens * CHOSEN * WIDTH * HIDDEN)
    for result in results.values():
        if "us" in result:
            result["TB/s"] = met * 3 * WIDTH * HIDDEN * 2 / result["us"] / 1e6
    return results


def as_graph(function: Callable, arguments: tuple) -> Callable:
    """Captured when it is first called, so that what cannot be captured is told in its column."""
    replays: list[Callable] = []

    def form() -> torch.Tensor:
        if not replays:
            replays.append(captured(lambda: function(*arguments)))
        return replays[0]()

    return form


def few_tiles(tokens: int) -> dict[str, dict]:
    """The gated product of a decode step by each cut for few rows."""
    x, gate_up, _, experts, _ = block_of(tokens)
    arrangement = arrange(experts, EXPERTS, 16)
    forms = {}
    for cut in SWEPT_FOR_FEW:
        function = functools.partial(grouped_product, gated=True, tiles=cut)
        forms[str(tuple(cut))] = of_places(as_graph(function, (x, gate_up, arrangement)), arrangement)
    return in_turns(forms, 4 * tokens * CHOSEN * WIDTH * HIDDEN)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    if machine().tier == "none":
        print("bench experts needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, table = clocks(), {}
    rows: dict[str, Callable] = {}
    for skewed, name in ((False, "uniform"), (True, "skewed")):
        rows[f"product, {name}"] = functools.partial(product, skewed)
        rows[f"block, {name}"] = functools.partial(block, skewed, False)
        rows[f"block with backward, {name}"] = functools.partial(block, skewed, True)
    rows |= {f"few tokens: {tokens}": functools.partial(few, tokens) for tokens in FEW_TOKENS}
    if arguments == ["tiles"]:
        rows = {"tiles, uniform": functools.partial(product, False, SWEPT),
                "tiles for 8 tokens": functools.partial(few_tiles, 8)}  # fmt: skip
    for name, measure in rows.items():
        table[name] = results = measure()
        for form, it in results.items():
            figure = it.get("missing") or f"{it['us']:8,.1f} µs {it['tflops']:6,.0f} TFLOP/s"
            figure += f" {it['TB/s']:.2f} TB/s" if "TB/s" in it else ""
            print(f"{name:<32}{form:<28}{figure}", flush=True)
        torch.cuda.empty_cache()
    print(write_record("experts", before, table=table))
    return 0
