"""The ceilings of a GPU: memory, L2, what lies on the multiprocessors, multiply-adds, matrix units, launches."""

import time

import torch

from course_lib.hardware.ceilings.kernels import multiply_add_kernel, nothing_kernel, read_kernel, reread_kernel
from course_lib.hardware.device import known, machine, supports_bfloat16, supports_float8
from course_lib.hardware.timing import Timing, measure

SECONDS = 0.2  # for each figure
LARGEST_TENSOR = 2**30  # bytes
READ_BLOCK, READ_ROUNDS = 4096, 8
REREAD_BLOCK = 2048
REREAD_PROGRAMS_PER_SM = 4
ON_CHIP_WINDOW = 16 * 1024  # bytes: fits the L1 of every multiprocessor since Turing
MULTIPLY_ADD_BLOCK = 1024
LAUNCHES, LAUNCH_ROUNDS = 1000, 5


def measure_gpu() -> dict:
    """The figures of `Ceilings`, as keyword arguments."""
    spread: dict[str, float] = {}
    notes: list[str] = []
    figures = memory_figures(spread)
    figures["fma_rate"] = multiply_add_rate(spread)
    figures["launch_overhead"] = launch_seconds(spread)
    figures["matmul_rate"] = matmul_rates(spread, notes)
    return figures | {"spread": spread, "notes": tuple(notes)}


def timed(function) -> Timing:
    return measure(function, seconds=SECONDS, device="cuda")


def memory_figures(spread: dict) -> dict:
    """Bandwidths of the memory and of the levels above it, bytes/s."""
    size = min(LARGEST_TENSOR, torch.cuda.mem_get_info()[0] // 8) // 2**22 * 2**22
    source = torch.rand(size // 4, device="cuda")
    target = torch.empty_like(source)
    programs = source.numel() // (READ_BLOCK * READ_ROUNDS)
    sums = torch.empty(max(programs, REREAD_PROGRAMS_PER_SM * known(machine().sm_count)), device="cuda")

    def read():
        read_kernel[(programs,)](source, sums, READ_ROUNDS, BLOCK=READ_BLOCK, num_warps=4)

    def reread(window_bytes, rounds, cache):
        reread_window(source, sums, power_of_two(window_bytes), rounds, cache)

    reread_bytes = REREAD_PROGRAMS_PER_SM * known(machine().sm_count) * REREAD_BLOCK * 4  # a round
    runs = {
        "copy_bandwidth": (lambda: target.copy_(source), 2 * source.nbytes),
        "read_bandwidth": (read, programs * READ_ROUNDS * READ_BLOCK * 4),
        "l2_bandwidth": (lambda: reread(known(machine().l2_bytes) // 2, 2048, ".cg"), 2048 * reread_bytes),
        "on_chip_bandwidth": (lambda: reread(ON_CHIP_WINDOW, 16384, ".ca"), 16384 * reread_bytes),
    }
    figures = {}
    for figure, (run, bytes_moved) in runs.items():
        timing = timed(run)
        figures[figure] = bytes_moved / timing.median
        spread[figure] = timing.spread
    return figures


def reread_window(source, sums, window_bytes: int, rounds: int, cache: str) -> None:
    """Launch `reread_kernel` on the first `window_bytes` (a power of two, at least two blocks) of `source`.

    Programs start far apart: were neighbours to read the same lines at nearly the same time, the requests of several
    multiprocessors would be merged on their way to the L2, and it would look twice as fast as it is. Few programs, for
    the same reason: what is in flight at once must be small beside the window.
    """
    blocks = window_bytes // (4 * REREAD_BLOCK)
    step = int(blocks * 0.618) | 1  # the golden section spreads any number of starts evenly; odd, so that all differ
    reread_kernel[(REREAD_PROGRAMS_PER_SM * known(machine().sm_count),)](
        source, sums, rounds, BLOCK=REREAD_BLOCK, BLOCKS=blocks, STEP=step, CACHE=cache, num_warps=4
    )


def power_of_two(value: int) -> int:
    """The largest power of two that is not above `value`."""
    return 1 << (value.bit_length() - 1)


def multiply_add_rate(spread: dict) -> float:
    """FLOP/s of float32 multiply-adds in registers."""
    programs, rounds = 64 * known(machine().sm_count), 256
    source = torch.rand(programs * MULTIPLY_ADD_BLOCK, device="cuda")
    target = torch.empty_like(source)

    def run():
        multiply_add_kernel[(programs,)](source, target, rounds, 0.5, 0.25, BLOCK=MULTIPLY_ADD_BLOCK, num_warps=4)

    timing = timed(run)
    spread["fma_rate"] = timing.spread
    return 2 * 16 * rounds * source.numel() / timing.median


def launch_seconds(spread: dict) -> float:
    """Host seconds for each launch of an empty Triton kernel, in a row of many."""
    nothing_kernel[(1,)](num_warps=1)  # compiles
    rounds = []
    for _ in range(LAUNCH_ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            nothing_kernel[(1,)](num_warps=1)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / LAUNCHES)
    spread["launch_overhead"] = (max(rounds) - min(rounds)) / sorted(rounds)[LAUNCH_ROUNDS // 2]
    return sorted(rounds)[LAUNCH_ROUNDS // 2]


def matmul_rates(spread: dict, notes: list) -> dict[str, float]:
    """FLOP/s of a square matrix product, for each dtype that this GPU and its libraries multiply."""
    size = 8192 if known(machine().sm_count) >= 100 else 4096
    names = ["float32"]
    names += ["tf32"] if machine().computes_like((8, 0)) else []
    names += ["float16"]
    names += ["bfloat16"] if supports_bfloat16() else []
    names += ["float8_e4m3fn"] if supports_float8() else []
    rates = {}
    for name in names:
        try:
            timing = matmul_timing(name, size)
        except RuntimeError as error:  # the library of this PyTorch has no such product for this GPU
            notes.append(f"The {name} matrix product could not be measured: {str(error).splitlines()[0]}")
            continue
        rates[name] = 2 * size**3 / timing.median
        spread[f"matmul_rate.{name}"] = timing.spread
    return rates


def matmul_timing(name: str, size: int) -> Timing:
    """Time of one [size, size] x [size, size] product on random numbers (zeros draw less power and run faster)."""
    left = torch.randn(size, size, device="cuda")
    right = torch.randn(size, size, device="cuda")
    if name == "float8_e4m3fn":
        one = torch.ones((), device="cuda")
        left = left.to(torch.float8_e4m3fn)
        right = right.to(torch.float8_e4m3fn).t()  # the library takes the right factor transposed only
        return timed(lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float16))
    if name not in ("float32", "tf32"):
        left, right = left.to(getattr(torch, name)), right.to(getattr(torch, name))
    out = torch.empty_like(left)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        return timed(lambda: torch.matmul(left, right, out=out))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
