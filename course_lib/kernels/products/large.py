"""A matrix product for many rows by the fastest of the course's kernels that can take it, and which one that is.

    choose(x, weight)                   # says which kernel runs, and why; runs nothing
    large_product(x, weight)            # runs it

The one for Hopper asks for most and is the fastest where there are many tiles. With few of them its programs end too
unevenly, and the one in Triton with the copy engine is faster: 751 against 650 TFLOP/s at 4096³, and 693 against 704 at
8192³ (H200, bf16, November 2026). The persistent kernel takes everything. The choice changes the time and, through the
order of additions, the last bits.
"""

import torch
import triton

from course_lib.kernels.common.choice import Choice
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.products.checks import check_product
from course_lib.kernels.products.hopper_limits import hopper_product_refusal
from course_lib.kernels.products.persistent import persistent_product
from course_lib.kernels.products.tma import FIRST_WITH_COPY_ENGINE, refusal_of_copy_engine, tma_product

TILE = 128  # rows and columns
FEW_TILES = 1500  # 11 rounds of an H200's 132 programs


def choose(x, weight, *, bias=None, activation=None, residual=None, gated=False) -> Choice:
    """Which kernel `large_product` runs for these arguments, "hopper", "copy engine" or "persistent", and why.

    Raises:
        ValueError: no kernel takes them; the message names the argument.
    """
    columns = check_product(x, weight, bias, activation, residual, gated)
    arch = architecture_of(x.device)
    if arch is None or arch < FIRST_WITH_COPY_ENGINE:
        return Choice("persistent", "this machine has no copy engine.")
    refusal = refusal_of_copy_engine(x, weight, columns)
    if refusal or x.dtype == torch.float32:
        return Choice("persistent", refusal or "in float32 the copy engine gains nothing.")
    refused = hopper_product_refusal(x, weight, residual, x.new_empty(0, columns), activation)
    if refused is not None:
        return Choice("copy engine", refused.reason)
    tiles = triton.cdiv(x.shape[0], TILE) * triton.cdiv(weight.shape[0], TILE)
    if tiles < FEW_TILES and not gated:
        return Choice("copy engine", f"there are {tiles:,} tiles, and below {FEW_TILES:,} it is faster.")
    return Choice("hopper", "the GPU is a Hopper, and its copy engine and matrix units take these inputs.")


def large_product(x, weight, *, bias=None, activation=None, residual=None, gated=False) -> torch.Tensor:
    """x · weightᵀ and what stands behind it. Arguments, result and errors are those of `persistent_product`.

    x: [rows, inner], weight: [outer, inner]; returns [rows, outer], or [rows, outer / 2] with a gate, of x's dtype.
    """
    options = {"bias": bias, "activation": activation, "residual": residual, "gated": gated}
    kernel = choose(x, weight, **options).kernel
    if kernel == "hopper":
        # Only here, where it is known to work: Gluon needs a Triton that has it.
        from course_lib.kernels.products.hopper import product_hopper

        return product_hopper(x, weight, **options)
    run = tma_product if kernel == "copy engine" else persistent_product
    return run(x, weight, **options)
