"""A product with a weight by whichever is faster: cuBLAS, or the course's kernel for few rows.

    rows       taken         measured on an H200, bf16, Llama-3.2-1B's shapes
    to 16      few rows      as fast on large weights, faster on small ones ([2048, 8192]: 15.3 µs against 16.5); it has
                             the gate in it, and its weights come while the kernel before still runs
    17 to 64   few rows for weights of MANY rows (the logits), cuBLAS for the others
    more       cuBLAS

float32 has no matrix instructions in the course's kernel, so it is cuBLAS's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.products.checks import FIRST_WITH_DEPENDENT_LAUNCHES
from course_lib.kernels.products.few_rows import few_rows_product
from course_lib.kernels.products.tiles import LEAST_ROWS, MOST_ROWS
from course_lib.kernels.products.workspace import ProductWorkspace

MANY = 65_536
FIRST_WITH_FAST_PRODUCTS = 80


def by_few_rows(rows: int, outer: int, dtype: torch.dtype, arch: int | None) -> bool:
    """Whether the course's kernel is taken for x [rows, inner] and a weight [outer, inner].

    arch: 90, ...; None in the interpreter, which has but this one.
    """
    if arch is not None and (arch < FIRST_WITH_FAST_PRODUCTS or dtype == torch.float32):
        return False
    return rows <= LEAST_ROWS or rows <= MOST_ROWS and outer >= MANY


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    workspace: ProductWorkspace | None = None,
) -> torch.Tensor:
    """x [rows, inner] · weight [outer, inner]ᵀ; allocates its result and nothing else if there is a workspace.

    gated: `gated(gate, up)` gives silu(gate) · up, of the two halves of the result; it is called where no kernel has
        that in it. None for the product alone. workspace: what `few_rows_workspace` made.
    """
    arch = architecture_of(weight.device)
    if by_few_rows(x.shape[0], weight.shape[0], weight.dtype, arch):
        dependent = arch is not None and arch >= FIRST_WITH_DEPENDENT_LAUNCHES
        return few_rows_product(x, weight, gated=gated is not None, dependent=dependent, workspace=workspace)
    result = F.linear(x, weight)
    return result if gated is None else gated(*result.chunk(2, dim=-1))
