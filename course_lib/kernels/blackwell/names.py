"""Gluon's names for Blackwell beside those of `kernels.gluon.names`: tensor memory, and the products that fill it.

Importing this module raises an ImportError, in one sentence, on a Triton without them.
"""

import triton

try:
    from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
    from triton.experimental.gluon.language.nvidia.blackwell import (
        TensorMemoryLayout,
        allocate_tensor_memory,
        tcgen05_mma,
        tensor_memory_descriptor,
    )

    reinterpreted = getattr(tensor_memory_descriptor, "reinterpret", None) or tensor_memory_descriptor._reinterpret
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"Triton {triton.__version__} lacks a part of Gluon for Blackwell ({error}); install Triton 3.6 to 3.9."
    ) from error


@builtin
def reinterpret_columns(tile, dtype, shape, layout, _semantic=None):
    """The same columns of tensor memory under another type, shape and layout. 3.6 has it as a private method."""
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return reinterpreted(tile, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout), _semantic=_semantic)


__all__ = [
    "TensorMemoryLayout", "allocate_tensor_memory", "reinterpret_columns", "tcgen05_mma", "tensor_memory_descriptor",
]  # fmt: skip
