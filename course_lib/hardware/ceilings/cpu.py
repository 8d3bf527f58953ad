"""The ceilings of a CPU, so that the roofline is real without a GPU too. All through PyTorch, on all its threads.

- Memory: a copy and a sum over tensors many times the size of the last cache.
- Multiply-adds: one PyTorch operator over a block that stays in the cache, the fastest of a few block sizes. That is
  the roof of anything written as a chain of operators; a compiled loop with its values in registers would pass it.
- Matrix product: float32, through the vendor's library.
"""

import torch

from course_lib.hardware.device import machine
from course_lib.hardware.timing import Timing, measure

SECONDS = 0.3  # for each figure
LEAST_TENSOR, LARGEST_TENSOR = 128 * 2**20, 2**30  # bytes
MATMUL_SIZES = (1024, 2048)
CACHED_ELEMENTS = (128 * 1024, 256 * 1024, 512 * 1024)
OPERATORS_PER_TIMING = 20


def measure_cpu() -> dict:
    """The figures of `Ceilings`, as keyword arguments."""
    source = torch.ones(tensor_bytes() // 4)
    target = torch.zeros_like(source)
    copying = timed(lambda: target.copy_(source))
    reading = timed(source.sum)
    product, size = fastest({size: matmul_of(size) for size in MATMUL_SIZES}, cost=lambda size: size**3)
    chain, cached = fastest({elements: multiply_adds_of(elements) for elements in CACHED_ELEMENTS})
    one = torch.ones(1)
    calling = timed(lambda: [one.add_(1.0) for _ in range(OPERATORS_PER_TIMING)])
    values_per_second = OPERATORS_PER_TIMING * cached / chain.best
    return {
        "copy_bandwidth": 2 * source.nbytes / copying.best,
        "read_bandwidth": source.nbytes / reading.best,
        "matmul_rate": {"float32": 2 * size**3 / product.best},
        "fma_rate": 2 * values_per_second,
        "launch_overhead": calling.best / OPERATORS_PER_TIMING,
        "l2_bandwidth": None,
        "on_chip_bandwidth": 8 * values_per_second,  # each multiply-add reads 4 bytes and writes 4, in the cache
        "spread": {
            "copy_bandwidth": copying.spread,
            "read_bandwidth": reading.spread,
            "matmul_rate.float32": product.spread,
            "fma_rate": chain.spread,
            "launch_overhead": calling.spread,
        },
    }


def tensor_bytes() -> int:
    """Four times the last cache, within limits and an eighth of the memory, in whole MiB."""
    last_cache = max((size for _, size in machine().cpu_caches), default=0)
    wanted = min(max(4 * last_cache, LEAST_TENSOR), LARGEST_TENSOR)
    return min(wanted, (machine().memory_bytes or 2**33) // 8) // 2**20 * 2**20


def timed(function) -> Timing:
    return measure(function, seconds=SECONDS, warmup=2, flush=False, device="cpu")


def fastest(runs: dict, cost=lambda size: size) -> tuple[Timing, int]:
    """Of functions keyed by their size, the one with the least time for each unit of `cost`: (timing, size)."""
    timings = {size: timed(run) for size, run in runs.items()}
    best = min(timings, key=lambda size: timings[size].best / cost(size))
    return timings[best], best


def matmul_of(size: int):
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return lambda: torch.matmul(left, right, out=out)


def multiply_adds_of(elements: int):
    """A run of multiply-adds, value * 0.5 + 0.25, over `elements` values in the cache."""
    value, bias = torch.rand(elements), torch.tensor(0.25)

    def run():
        for _ in range(OPERATORS_PER_TIMING):
            torch.add(bias, value, alpha=0.5, out=value)

    return run
