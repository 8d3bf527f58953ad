"""Runs a CUDA C++ kernel of the course on the processor: its own source as C++, a thread of the system for each of its.

What CUDA adds to C++ is supplied here: indices, shared memory (one block at a time), the barrier of a block, and
shuffles, for which the 32 threads of a warp meet twice. Conversions to 16 bits are the processor's. So what is tested
is the kernel's text with its launcher's arguments: indices, strides, masks, sums; not the compiler for GPUs.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from course_lib.hardware.compiler.cuda_cpp import CudaLaunch
from course_lib.kernels.fused.cuda_rows import CONVERSIONS

PRELUDE = r"""
#include <barrier>
#include <bit>
#include <cmath>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static
struct Index { int x; };
static thread_local Index threadIdx;
static thread_local Index blockIdx;
static std::barrier<>* block_barrier;
static std::vector<std::barrier<>*> warp_barriers;
static float exchanged[1024];
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float value, int distance) {
    std::barrier<>* warp = warp_barriers[threadIdx.x / 32];
    exchanged[threadIdx.x] = value;
    warp->arrive_and_wait();
    const float other = exchanged[threadIdx.x ^ distance];
    warp->arrive_and_wait();
    return other;
}
static float rsqrtf(float number) { return 1.0f / std::sqrt(number); }

struct half_bits { unsigned short bits; };
struct bfloat16_bits { unsigned short bits; };
static float widened(float number) { return number; }
static float widened(half_bits number) { return (float)std::bit_cast<_Float16>(number.bits); }
static float widened(bfloat16_bits number) { return std::bit_cast<float>((unsigned)number.bits << 16); }
static void narrow(float wide, float& number) { number = wide; }
static void narrow(float wide, half_bits& number) { number.bits = std::bit_cast<unsigned short>((_Float16)wide); }
static void narrow(float wide, bfloat16_bits& number) {
    const unsigned bits = std::bit_cast<unsigned>(wide);
    number.bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
"""
RUN = r"""
template <typename... Values> void all_threads(void (*kernel)(Values...), int grid, int threads, Values... values) {
    block_barrier = new std::barrier<>(threads);
    for (int warp = 0; warp < threads / 32; ++warp) warp_barriers.push_back(new std::barrier<>(32));
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread)
        running.emplace_back([=] {
            threadIdx.x = thread;
            for (int block = 0; block < grid; ++block) {
                blockIdx.x = block;
                kernel(values...);
                __syncthreads();
            }
        });
    for (auto& thread : running) thread.join();
    for (auto* warp : warp_barriers) delete warp;
    warp_barriers.clear();
    delete block_barrier;
}
"""


def missing_compiler() -> str | None:
    """Why nothing can be run here, as a sentence; None where it can."""
    if shutil.which("g++") is None:
        return "no g++ was found: it compiles the kernels for the processor"
    asked = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(asked, input="#include <barrier>\n_Float16 number;\n", capture_output=True, text=True)
    return None if done.returncode == 0 else "this g++ has no barriers (C++20) or no _Float16: version 12 has both"


@functools.cache
def library(source: str, name: str) -> ctypes.CDLL:
    if CONVERSIONS not in source:
        raise ValueError("the source does not contain CONVERSIONS, which the processor's own take the place of")
    head, tail = source.split(CONVERSIONS)
    parameters = tail[tail.index(f"{name}(") :].split("{")[0].rsplit(")", 1)[0].split("(", 1)[1]
    lines = "\n".join(line.split("//")[0] for line in parameters.splitlines())
    names = ", ".join(parameter.split()[-1] for parameter in lines.split(","))
    call = f'extern "C" void run(int grid, int threads, {lines}) {{ all_threads({name}, grid, threads, {names}); }}'
    with tempfile.TemporaryDirectory() as folder:
        file, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        file.write_text(head + PRELUDE + tail + RUN + call)
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w"]
        done = subprocess.run(["g++", *flags, str(file), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ refused {name}:\n{done.stderr[:4000]}")
        return ctypes.CDLL(str(built))


def run_on_host(launch: CudaLaunch) -> None:
    """Runs all blocks, one after another, on tensors of the processor."""

    def value(argument):
        if argument is None or isinstance(argument, torch.Tensor):
            return ctypes.c_void_p(None if argument is None else argument.data_ptr())
        return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)

    values = [value(argument) for argument in launch.arguments]
    library(launch.source, launch.name).run(ctypes.c_int(launch.grid), ctypes.c_int(launch.threads), *values)
