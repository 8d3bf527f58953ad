"""Gluon under one set of names, whatever Triton calls them: what was renamed between 3.6 and 3.9 is settled here.

Gluon is Triton's lower level: the same Python, but the kernel chooses each tile's layout in registers or shared memory,
issues copies and matrix products itself, and says when to wait for them. It has no interpreter.

Importing this module raises an ImportError, in one sentence, on a Triton without the parts for Hopper.
"""

import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # 3.9 keeps the names of 3.6 only to raise; 3.6 doesn't know those of 3.9.
    if hasattr(tma, "async_load"):
        load_tile, store_tile = tma.async_load, tma.async_store
    else:
        load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    wait_for_stores = tma.store_wait
    # Each thread copies what it will read: no copy engine, no barrier in memory.
    copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    end_copies, wait_for_copies = async_copy.commit_group, async_copy.wait_group
    meet = getattr(gl, "barrier", None) or gl.thread_barrier
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
    from triton.language.core import _aggregate as aggregate

    ADD = ir.DESCRIPTOR_REDUCE_KIND.ADD
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"Triton {triton.__version__} lacks a part of Gluon for Hopper ({error}); install Triton 3.6 to 3.9."
    ) from error


@builtin
def add_tile(tensor_desc, coord, src, _semantic=None):
    """Asks the copy engine to add a tile of shared memory to one in memory. Triton 3.6 has it, without a name."""
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ADD, tensor_desc.handle, coordinates, src.handle)


@builtin
def reinterpret(tile, shape, layout, _semantic=None):
    """The same bytes of shared memory under another shape and layout. 3.6 has it as a private method."""
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(tile, tile.dtype, shape, _unwrap_if_constexpr(layout))


__all__ = [
    "TensorDescriptor", "add_tile", "aggregate", "copy_to_shared", "end_copies", "fence_async_shared", "gl", "gluon",
    "load_tile", "mbarrier", "meet", "reinterpret", "store_tile", "wait_for_copies", "wait_for_stores", "warpgroup_mma",
    "warpgroup_mma_init", "warpgroup_mma_wait",
]  # fmt: skip
