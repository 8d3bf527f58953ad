"""`python -m course_lib bench fused`: the fused kernels beside PyTorch, torch.compile and Liger, in one run.

bf16, tensors of about a gigabyte. Bandwidth counts the bytes that must move at least: each input once and each result
once, for cross-entropy the logits once and their gradient once. A form that reads a row twice shows as slower. The
share is that of PyTorch's copy of a gigabyte, measured before.

Each form is a replayed CUDA graph where it can be captured, and a call otherwise ("called"); all of a row are timed in
turns (`measure_together`), the L2 cache flushed before each. Results are compared with float64 on the first rows, the
error relative to their norm. Figures, versions and clocks go to fused.json in the bench folder.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.bench._record import clocks, write_record
from course_lib.bench.softmax import copy_bandwidth
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.hardware.units import format_bandwidth
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.fused.cross_entropy import cross_entropy_backward_reference
from course_lib.kernels.fused.cross_entropy_operators import cross_entropy, cross_entropy_
from course_lib.kernels.fused.cuda_add_rms_norm import cuda_add_rms_norm
from course_lib.kernels.fused.cuda_cross_entropy import FIRST_WITH_CLUSTERS, cuda_cross_entropy_forward_backward_
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward, group_norm_mish_reference
from course_lib.kernels.fused.linear_cross_entropy import (
    linear_cross_entropy_backward_reference,
    linear_cross_entropy_forward_backward,
)
from course_lib.kernels.fused.linear_cross_entropy_operators import linear_cross_entropy
from course_lib.kernels.fused.rms_norm_backward import rms_norm_backward, rms_norm_backward_reference
from course_lib.kernels.fused.rope_append import rope_append, rope_append_reference
from course_lib.kernels.fused.swiglu import (
    swiglu_backward,
    swiglu_backward_reference,
    swiglu_forward,
    swiglu_reference,
)
from course_lib.kernels.softmax.rows import softmax, softmax_reference

EPSILON = 1e-5
CHECKED_ROWS = 4
Forms = dict[str, Callable]  # {column: a function of no arguments}
LARGEST_ERROR = 1e-2  # of the norm; right kernels err by about 2e-3 in bf16
SECONDS_PER_FIGURE = 0.2


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of the table.

    Attributes:
        forms: {column: a function of no arguments}. The result is a tensor or several.
        exact: what the first CHECKED_ROWS rows of the first results must be, in float64.
        bytes: that must move at least.
    """

    forms: Forms
    exact: tuple[torch.Tensor, ...]
    bytes: int


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16 if supports_bfloat16() else torch.float16)


def compiled(function: Callable) -> Callable:
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def liger(name: str) -> Callable | None:
    """A function of Liger's by its name, where it is installed and has it."""
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import functional  # type: ignore[import-not-found]

        return getattr(functional, name, None)
    return None


def with_liger(forms: Forms, name: str, *arguments, **options) -> Forms:
    function = liger(name)
    return forms if function is None else forms | {"Liger": functools.partial(function, *arguments, **options)}


def plain_add_rms_norm(x, residual, weight):
    summed = x + residual
    return F.rms_norm(summed, (x.shape[1],), weight, EPSILON), summed


def add_and_norm(rows: int, columns: int) -> Problem:
    x, residual, weight = random(rows, columns), random(rows, columns), random(columns)
    first = (x + residual)[:CHECKED_ROWS].double()
    forms: Forms = {
        "eager": functools.partial(plain_add_rms_norm, x, residual, weight),
        "torch.compile": functools.partial(compiled(plain_add_rms_norm), x, residual, weight),
        "ours": functools.partial(add_rms_norm_forward, x, residual, weight, EPSILON),
        "ours, CUDA C++": functools.partial(cuda_add_rms_norm, x, residual, weight, EPSILON),
    }
    forms = with_liger(forms, "liger_fused_add_rms_norm", x, residual, weight, EPSILON)
    return Problem(forms, (F.rms_norm(first, (columns,), weight.double(), EPSILON), first), 4 * x.nbytes)


def norm_alone(rows: int, columns: int) -> Problem:
    x, weight = random(rows, columns), random(columns)
    function = functools.partial(F.rms_norm, normalized_shape=(columns,), eps=EPSILON)
    forms: Forms = {
        "eager": functools.partial(function, x, weight=weight),
        "torch.compile": functools.partial(compiled(function), x, weight=weight),
        "ours": lambda: add_rms_norm_forward(x, None, weight, EPSILON)[0],
    }
    forms = with_liger(forms, "liger_rms_norm", x, weight, EPSILON)
    return Problem(forms, (function(x[:CHECKED_ROWS].double(), weight=weight.double()),), 2 * x.nbytes)


def softmax_of_rows(rows: int, columns: int) -> Problem:
    x = random(rows, columns)
    function = functools.partial(torch.softmax, dim=-1)
    forms: Forms = {
        "eager": functools.partial(function, x),
        "torch.compile": functools.partial(compiled(function), x),
        "ours": functools.partial(softmax, x),
    }
    return Problem(forms, (softmax_reference(x[:CHECKED_ROWS].double()),), 2 * x.nbytes)


def plain_rope_append(qkv, cosine, sine, key_cache, value_cache):
    """Queries and keys turned, keys and values at the start of their caches: `rope_append` from position 0 on."""
    key_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [batch, heads, tokens, head_dim]
    tokens = heads.shape[2]
    first, second = heads[:, :-key_heads].float().chunk(2, dim=-1)
    cosine, sine = cosine[:tokens], sine[:tokens]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(qkv.dtype)
    key_cache[:, :, :tokens] = turned[:, -key_heads:]
    value_cache[:, :, :tokens] = heads[:, -key_heads:]
    return turned[:, :-key_heads].contiguous()


def rope_into_caches(batch: int, tokens: int, query_heads: int, key_heads: int, head_dim: int) -> Problem:
    """The first tokens of each sequence, from a packed QKV; the results are the query and both caches."""
    qkv = random(batch, tokens, (query_heads + 2 * key_heads) * head_dim)
    frequencies = 500_000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1, device="cuda")[:-1]
    angles = torch.arange(tokens, device="cuda")[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    positions = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def with_caches(function):
        """Each form writes caches of its own."""
        caches = [torch.zeros(batch, key_heads, tokens, head_dim, dtype=qkv.dtype, device="cuda") for _ in "kv"]
        return lambda: (function(qkv, cosine, sine, *caches), *caches)

    def exact():
        wide = qkv[:CHECKED_ROWS].double()
        caches = [wide.new_zeros(len(wide), key_heads, tokens, head_dim) for _ in "kv"]
        query = rope_append_reference(wide, cosine, sine, *caches, positions[:CHECKED_ROWS])
        return query, *caches

    forms: Forms = {
        "eager": with_caches(plain_rope_append),
        "torch.compile": with_caches(compiled(plain_rope_append)),
        "ours": with_caches(functools.partial(rope_append, positions=positions, validate=False)),
    }
    return Problem(forms, exact(), 2 * qkv.nbytes)


def norm_backward(rows: int, columns: int) -> Problem:
    summed, weight, gradient, other = (random(rows, columns), random(columns), *(random(rows, columns) for _ in "12"))
    leaves = [tensor.requires_grad_() for tensor in (summed.clone(), weight.clone())]

    def through(function):
        results = function(leaves[0], (columns,), leaves[1], EPSILON), leaves[0] * 1
        return lambda: torch.autograd.grad(results, leaves, (gradient, other), retain_graph=True)

    few = [tensor[:CHECKED_ROWS].double() for tensor in (summed, gradient, other)]
    exact = rms_norm_backward_reference(few[0], weight.double(), few[1], few[2], EPSILON)[0]
    forms: Forms = {
        "eager": through(F.rms_norm),
        "torch.compile": functools.partial(
            compiled(functools.partial(rms_norm_backward_reference, epsilon=EPSILON)), summed, weight, gradient, other
        ),
        "ours": lambda: rms_norm_backward(summed, weight, gradient, other, EPSILON),
    }
    return Problem(forms, (exact,), 4 * summed.nbytes)


def swiglu_product(rows: int, columns: int) -> Problem:
    gate, up = random(rows, columns), random(rows, columns)

    def plain(gate, up):
        return F.silu(gate) * up

    forms: Forms = {
        "eager": functools.partial(plain, gate, up),
        "torch.compile": functools.partial(compiled(plain), gate, up),
        "ours": functools.partial(swiglu_forward, gate, up),
    }
    few = (tensor[:CHECKED_ROWS].double() for tensor in (gate, up))
    return Problem(with_liger(forms, "liger_swiglu", gate, up), (swiglu_reference(*few),), 3 * gate.nbytes)


def swiglu_gradients(rows: int, columns: int) -> Problem:
    gate, up, gradient = (random(rows, columns) for _ in range(3))
    leaves = [tensor.requires_grad_() for tensor in (gate.clone(), up.clone())]
    out = F.silu(leaves[0]) * leaves[1]
    forms: Forms = {
        "eager": lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True),
        "torch.compile": functools.partial(compiled(swiglu_backward_reference), gate, up, gradient),
        "ours": functools.partial(swiglu_backward, gate, up, gradient),
    }
    few = (tensor[:CHECKED_ROWS].double() for tensor in (gate, up, gradient))
    return Problem(forms, swiglu_backward_reference(*few), 5 * gate.nbytes)


def loss_and_gradient(rows: int, vocabulary: int) -> Problem:
    logits, targets = random(rows, vocabulary), torch.randint(vocabulary, (rows,), device="cuda")
    scale = torch.full((CHECKED_ROWS,), 1 / rows, dtype=torch.float64, device="cuda")
    exact = cross_entropy_backward_reference(logits[:CHECKED_ROWS].double(), targets[:CHECKED_ROWS], scale)

    def gradient_of(function):
        leaf = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(function(leaf, targets), leaf)[0]

    def overwritten(function):
        """What writes over its logits gets some of its own; a call again takes what the last one has left."""
        own = logits.clone()

        def run():
            function(own)
            return own

        return run

    def through_liger(own):
        function = liger("liger_cross_entropy")
        assert function is not None
        function(own.detach().requires_grad_(), targets)  # its forward pass writes the gradient

    forms: Forms = {
        "eager": gradient_of(F.cross_entropy),
        "torch.compile": gradient_of(compiled(F.cross_entropy)),
        "ours, two launches": gradient_of(functools.partial(cross_entropy, validate=False)),
        "ours, in place": overwritten(lambda own: cross_entropy_(own, targets, validate=False)),
    }
    if torch.cuda.get_device_capability()[0] >= FIRST_WITH_CLUSTERS:
        scales = scale[:1].float().expand(rows)
        forms["ours, CUDA C++"] = overwritten(
            lambda own: cuda_cross_entropy_forward_backward_(own, targets, scales, validate=False)
        )
    if liger("liger_cross_entropy") is not None:
        forms["Liger"] = overwritten(through_liger)
    return Problem(forms, (exact,), 2 * logits.nbytes)


GROUPS = 8


def plain_group_norm_mish(x, weight, bias, scale, shift):
    return F.mish(F.group_norm(x, GROUPS, weight, bias, EPSILON)) * scale[:, :, None] + shift[:, :, None]


def block_inputs(batch: int, channels: int, length: int) -> list[torch.Tensor]:
    """x, and weight, bias, scale and shift of GroupNorm + Mish."""
    return [
        random(batch, channels, length),
        random(channels),
        random(channels),
        *(random(batch, channels) for _ in "12"),
    ]


def norm_and_mish(batch: int, channels: int, length: int) -> Problem:
    tensors = block_inputs(batch, channels, length)
    x, weight, bias, scale, shift = tensors
    few, few_scale, few_shift = (tensor[:CHECKED_ROWS].double() for tensor in (x, scale, shift))
    vectors = weight.double(), bias.double()
    exact = group_norm_mish_reference(few, GROUPS, *vectors, few_scale, few_shift, EPSILON)
    forms: Forms = {
        "eager": functools.partial(plain_group_norm_mish, *tensors),
        "torch.compile": functools.partial(compiled(plain_group_norm_mish), *tensors),
        "ours": lambda: group_norm_mish_forward(x, GROUPS, weight, bias, scale, shift, EPSILON)[0],
    }
    return Problem(forms, (exact,), 2 * x.nbytes)


def linear_and_loss(tokens: int, width: int, vocabulary: int) -> Problem:
    """Loss and both gradients. Limited by its products and not by memory: compare times; the bandwidth says nothing."""
    hidden, weight = random(tokens, width), random(vocabulary, width) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    scales = torch.full((tokens,), 1 / tokens, device="cuda")
    few = hidden[:CHECKED_ROWS].double(), weight.double(), targets[:CHECKED_ROWS], scales[:CHECKED_ROWS].double()
    exact = linear_cross_entropy_backward_reference(*few)[0]

    def gradients_of(function):
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
        return lambda: torch.autograd.grad(function(*leaves), leaves)

    def plain(hidden, weight):
        return F.cross_entropy(F.linear(hidden, weight), targets)

    def known_gradient():
        return linear_cross_entropy_forward_backward(hidden, weight, targets, scales, validate=False)[1:]

    forms: Forms = {
        "eager": gradients_of(plain),
        "torch.compile": gradients_of(compiled(plain)),
        "ours, four products": gradients_of(functools.partial(linear_cross_entropy, targets=targets, validate=False)),
        "ours, three products": known_gradient,
    }
    return Problem(forms, (exact,), 2 * (hidden.nbytes + weight.nbytes))


TABLE: dict[str, Callable[[], Problem]] = {
    "add + RMSNorm 16k × 4096": functools.partial(add_and_norm, 16384, 4096),
    "add + RMSNorm 16k × 8192": functools.partial(add_and_norm, 16384, 8192),
    "add + RMSNorm 16k × 16384": functools.partial(add_and_norm, 16384, 16384),
    "RMSNorm 8k × 65536": functools.partial(norm_alone, 8192, 65536),
    "softmax 8k × 65536": functools.partial(softmax_of_rows, 8192, 65536),
    "RoPE, append 4 × 4096 × 48 × 128": functools.partial(rope_into_caches, 4, 4096, 32, 8, 128),
    "RMSNorm backward 16k × 4096": functools.partial(norm_backward, 16384, 4096),
    "RMSNorm backward 16k × 8192": functools.partial(norm_backward, 16384, 8192),
    "RMSNorm backward 8k × 16384": functools.partial(norm_backward, 8192, 16384),
    "SwiGLU 8k × 14336": functools.partial(swiglu_product, 8192, 14336),
    "SwiGLU backward 8k × 14336": functools.partial(swiglu_gradients, 8192, 14336),
    "cross-entropy 4096 × 128256": functools.partial(loss_and_gradient, 4096, 128_256),
    "cross-entropy 8192 × 32000": functools.partial(loss_and_gradient, 8192, 32_000),
    "GroupNorm + Mish 4096 × 256 × 16": functools.partial(norm_and_mish, 4096, 256, 16),
    "GroupNorm + Mish 256 × 512 × 256": functools.partial(norm_and_mish, 256, 512, 256),
    "GroupNorm + Mish 4096 × 512 × 256": functools.partial(norm_and_mish, 4096, 512, 256),
    "linear, loss 8k × 4096 × 128256": functools.partial(linear_and_loss, 8192, 4096, 128_256),
}


def error_of(result, exact: tuple[torch.Tensor, ...]) -> float:
    """The largest relative error among the results, on the rows that are known exactly."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    pairs = zip(results, exact)
    return max(((ours[:CHECKED_ROWS].double() - right).norm() / right.norm()).item() for ours, right in pairs)


def measure_problem(problem: Problem, copy: float) -> dict[str, dict]:
    """{column: "us", "tbps", "share", "low", "high", "error"; or "missing", why there are none}."""
    results: dict[str, dict] = {}
    runs = {}
    for name, function in problem.forms.items():
        try:
            error = error_of(function(), problem.exact)
        except (RuntimeError, ValueError) as refusal:  # what this machine or this library cannot do
            results[name] = {"missing": str(refusal).strip().splitlines()[0][:160]}
            continue
        results[name] = {"error": error}
        if error > LARGEST_ERROR:
            results[name]["missing"] = f"wrong: its error is {error:.1e}"
            continue
        try:
            runs[name] = captured(function)
        except RuntimeError:  # it waits for the GPU somewhere
            runs[name] = function
            results[name]["called"] = True
    for name, timing in measure_together(runs, seconds=SECONDS_PER_FIGURE).items():
        bandwidth = timing.bandwidth(problem.bytes)
        results[name] |= {"us": timing.median * 1e6, "low": timing.low * 1e6, "high": timing.high * 1e6,
                          "tbps": bandwidth / 1e12, "share": bandwidth / copy}  # fmt: skip
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench fused needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, copy = clocks(), copy_bandwidth()
    print(f"copy: {format_bandwidth(copy)}\n{'':<42}{'':<20}{'TB/s':>7}{'of copy':>9}{'µs':>9}{'error':>10}")
    table = {}
    for name, make in TABLE.items():
        table[name] = measure_problem(make(), copy)
        for form, it in table[name].items():
            figures = f"{it['tbps']:>7.2f}{it['share']:>9.3f}{it['us']:>9.1f}{it['error']:>10.1e}" if "us" in it else ""
            note = "  (called)" if it.get("called") else ""
            print(f"{name:<42}{form:<20}{figures or ' – ' + it['missing']}{note}", flush=True)
        torch.cuda.empty_cache()
    write_record("fused", before, copy=copy, table=table)
    return 0
