"""A product with a weight by whichever is faster: the course's kernel for few rows, or cuBLAS for more than MOST_ROWS.

The course's own starts while the kernel before still runs, and has the gate in it. An engine's step of Llama-3.2-1B's
shape with 64 rows takes 1.68 ms with it and 1.76 with cuBLAS, with 32 rows 1.58 and 1.49 (H200, bf16, November 2026).

float32 has no matrix instructions in the course's kernel, so it is cuBLAS's.
"""

import torch
import torch.nn.functional as F

from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.fused.swiglu import swiglu_forward
from course_lib.kernels.products.few_rows import few_rows_product
from course_lib.kernels.products.tiles import MOST_ROWS
from course_lib.kernels.products.workspace import ProductWorkspace

FIRST_WITH_FAST_PRODUCTS = 80


def by_few_rows(rows: int, dtype: torch.dtype, arch: int | None) -> bool:
    """Whether the course's kernel is taken for x [rows, inner]; arch: 90, ...; None in the interpreter."""
    if arch is not None and (arch < FIRST_WITH_FAST_PRODUCTS or dtype == torch.float32):
        return False
    return 1 <= rows <= MOST_ROWS


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    workspace: ProductWorkspace | None = None,
) -> torch.Tensor:
    """x [rows, inner] · weight [outer, inner]ᵀ; allocates its result and nothing else if there is a workspace.

    gated: the result is silu(gate) · up, of the two halves of the product. workspace: what `few_rows_workspace` made.
    """
    arch, early = architecture_of(weight.device), dependent_launches(weight.device)
    if by_few_rows(x.shape[0], weight.dtype, arch):
        return few_rows_product(x, weight, gated=gated, dependent=early, workspace=workspace)
    result = F.linear(x, weight)
    return swiglu_forward(*result.chunk(2, dim=-1)) if gated else result
