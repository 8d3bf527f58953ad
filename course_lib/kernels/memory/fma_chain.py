"""Multiply-add chain: a kernel whose arithmetic intensity is a parameter, to walk along the roofline.

    value = x[i];  `steps` times:  value = value * scale + bias;  out[i] = value

FLOPs: 2·steps·n. Bytes: 2·n·itemsize. Intensity in float32: steps/4 FLOP/byte. While the chain is short, a longer one
costs nothing, since the arithmetic hides behind memory; past the balance point its time grows with `steps`.

The values stay in registers for the whole chain. On a CPU the same idea is `fma_chain_blocked`: a block of values stays
in the cache for the whole chain, one PyTorch multiply-add a step. Triton's interpreter runs the kernel too, to check
it, but its time says nothing.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.roofline import Work
from course_lib.kernels.common.checks import check_contiguous, check_tensor, output_like

BLOCK = 1024
NUM_WARPS = 2  # 16 values a thread: independent chains that hide a multiply-add's latency and share the loop's cost
DTYPES = (torch.float32,)
DEFAULT_SCALE, DEFAULT_BIAS = 0.5, 0.25  # tends to 0.5: never overflows, never becomes a slow denormal
# On a CPU: 512 Ki values are 2 MiB, which the second-level caches of a few cores hold together, and long enough a run
# that PyTorch's cost of calling an operator (microseconds) is small beside it.
CPU_BLOCK = 512 * 1024


def fma_chain_work(length: int, steps: int, itemsize: int = 4) -> Work:
    """FLOPs and bytes of a chain of `steps` over `length` values."""
    return Work(f"multiply-add chain of {steps}", flops=2 * steps * length, bytes=2 * length * itemsize)


def fma_chain_reference(x, steps, scale=DEFAULT_SCALE, bias=DEFAULT_BIAS):
    """The plain PyTorch meaning; moves all values through memory at every step."""
    for _ in range(steps):
        x = x * scale + bias
    return x


@triton.jit
def fma_chain_kernel(x_pointer, out_pointer, length, steps, scale, bias, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    value = tl.load(x_pointer + offsets, mask=inside)  # [BLOCK]
    for _ in range(steps):
        value = tl.fma(value, scale, bias)  # one instruction, one rounding, whatever the compiler's default
    tl.store(out_pointer + offsets, value, mask=inside)


def fma_chain(x, steps, scale=DEFAULT_SCALE, bias=DEFAULT_BIAS, out=None) -> torch.Tensor:
    """`steps` times value * scale + bias, in one Triton kernel.

    Args:
        x: contiguous float32, any shape.
        steps: multiply-adds per value, at least 0.
        scale, bias: numbers.
        out: where to write; like x. None allocates.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, DTYPES)
    out = check_chain(x, steps, scale, bias, out)
    if x.numel() > 0:
        fma_chain_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, out, x.numel(), steps, float(scale), float(bias), BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out


def fma_chain_blocked(x, steps, scale=DEFAULT_SCALE, bias=DEFAULT_BIAS, out=None, block=CPU_BLOCK) -> torch.Tensor:
    """The chain in PyTorch, block by block, so that values stay cached between steps. Arguments as `fma_chain`."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        raise ValueError(f"x is {getattr(x, 'dtype', type(x).__name__)}; it must be a float32 torch.Tensor.")
    out = check_chain(x, steps, scale, bias, out)
    bias_value = torch.tensor(float(bias), device=x.device)
    for source, target in zip(x.view(-1).split(block), out.view(-1).split(block)):
        if steps == 0:
            target.copy_(source)
        for step in range(steps):
            # bias + scale * value: one multiply-add per value, one pass over the cached block.
            torch.add(bias_value, source if step == 0 else target, alpha=float(scale), out=target)
    return out


def run_fma_chain(x, steps, scale=DEFAULT_SCALE, bias=DEFAULT_BIAS, out=None) -> torch.Tensor:
    """The chain in the way whose time is real on x's device: the Triton kernel on a GPU, blocked PyTorch on a CPU."""
    run = fma_chain if isinstance(x, torch.Tensor) and x.is_cuda else fma_chain_blocked
    return run(x, steps, scale, bias, out)


def check_chain(x, steps, scale, bias, out) -> torch.Tensor:
    """The output tensor, once every argument has been looked at."""
    check_contiguous("x", x)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}; it must be a whole number of at least 0.")
    for name, value in (("scale", scale), ("bias", bias)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r}; it must be a number.")
    return output_like(out, "x", x)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: its one configuration."""
    signature = {"x_pointer": "*fp32", "out_pointer": "*fp32", "length": "i32", "steps": "i32", "scale": "fp32",
                 "bias": "fp32"}  # fmt: skip
    divisible = ("x_pointer", "out_pointer", "length")
    return [CompileCase(fma_chain_kernel, signature, {"BLOCK": BLOCK}, num_warps=NUM_WARPS, divisible=divisible)]
