"""Functions whose kernels' accesses are known: right ones, and one for each thing that can go wrong."""

import torch
import triton
import triton.language as tl

BLOCK = 32


@triton.jit
def add_kernel(x_pointer, y_pointer, result_pointer, length, stride, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (offsets < length) | (not MASKED)
    x = tl.load(x_pointer + offsets * stride, mask=inside)
    y = tl.load(y_pointer + offsets, mask=inside)
    tl.store(result_pointer + offsets, x + y, mask=inside)


def add(x, y, masked=True):
    result = torch.empty(x.numel())
    add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, result, x.numel(), x.stride(0), masked, BLOCK)
    return result


def add_unmasked(x, y):
    return add(x, y, masked=False)


@triton.jit
def tile_kernel(x_pointer, result_pointer, stride, SIZE: tl.constexpr):
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x_pointer + rows * stride + columns)
    tl.store(result_pointer + rows * stride + columns, tile)


def copy_tiles(x):
    result = torch.empty_like(x)
    tile_kernel[(x.shape[0] // 4, x.shape[1] // 4)](x, result, x.stride(0), SIZE=4)
    return result


@triton.jit
def blur_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_pointer + offsets - 1, mask=(offsets > 0) & (offsets < length), other=0.0)
    tl.store(result_pointer + offsets, left, mask=offsets < length)


def shift_in_place(x):
    blur_kernel[(triton.cdiv(x.numel(), 8),)](x, x, x.numel(), BLOCK=8)
    return x


@triton.jit
def total_kernel(x_pointer, total_pointer, ATOMIC: tl.constexpr):
    value = tl.load(x_pointer + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(total_pointer, value)
    else:
        tl.store(total_pointer, tl.load(total_pointer) + value)


def total(x, atomic):
    result = torch.zeros(1)
    total_kernel[(x.numel(),)](x, result, atomic)
    return result


@triton.jit
def endless_kernel(x_pointer, LOADS: tl.constexpr):
    tl.store(x_pointer, 1.0)
    count = 0
    while count < 1:
        if LOADS:
            tl.load(x_pointer)


def endless(x, loads):
    endless_kernel[(4,)](x, loads)


def endless_in_python(x):
    add(x, x)
    while True:
        pass


@triton.jit
def mismatched_kernel(x_pointer):
    values = tl.load(x_pointer + tl.arange(0, 8))
    tl.store(x_pointer + tl.arange(0, 8), values + tl.arange(0, 4))


def mismatched(x):
    mismatched_kernel[(2,)](x)


@triton.jit
def many_kernel(x_pointer):
    tl.store(x_pointer, 0.0)


def a_million_programs(x):
    many_kernel[(1_000_000,)](x)


@triton.jit
def idle_kernel(x_pointer, length):
    if tl.program_id(0) < length:
        tl.store(x_pointer, 0.0)


def a_million_idle_programs(x):
    idle_kernel[(1_000_000,)](x, 1)
