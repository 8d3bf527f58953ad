"""A product with a weight by whichever is faster: the course's kernel for few rows, or cuBLAS for more than MOST_ROWS.

The course's own starts while the kernel before still runs, and has the gate, the addition and both halves of a norm in
it. The graph of an engine's step, Llama-3.2-1B's shape with 64 rows, takes 1.60 ms with it (H200, bf16, November 2026);
with cuBLAS, and norm and gate in kernels of their own, it took 1.76.

float32 has no matrix instructions in the course's kernel, so it is cuBLAS's.
"""

import torch
import torch.nn.functional as F

from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.fused.swiglu import swiglu_forward
from course_lib.kernels.products.few_rows import Unscaled, few_rows_product
from course_lib.kernels.products.tiles import MOST_ROWS
from course_lib.kernels.products.workspace import ProductWorkspace

FIRST_WITH_FAST_PRODUCTS = 80


def by_few_rows(rows: int, dtype: torch.dtype, arch: int | None) -> bool:
    """Whether the course's kernel is taken for x [rows, inner]; arch: 90, ...; None in the interpreter."""
    if arch is not None and (arch < FIRST_WITH_FAST_PRODUCTS or dtype == torch.float32):
        return False
    return 1 <= rows <= MOST_ROWS


def product(
    x: torch.Tensor | Unscaled, weight: torch.Tensor, epsilon: float, *, gated: bool = False,
    workspace: ProductWorkspace | None = None,
) -> torch.Tensor:  # fmt: skip
    """x · weightᵀ; allocates its result and nothing else if there is a workspace.

    x: [rows, inner], or what `product_before_norm` gave. weight: [outer, inner]. epsilon: ε of the norm of `Unscaled`
    rows. gated: the result is silu(gate) · up, of the two halves of the product. workspace: of `few_rows_workspace`.
    """
    rows = x.rows if isinstance(x, Unscaled) else x
    if by_few_rows(rows.shape[0], weight.dtype, architecture_of(weight.device)):
        return few_rows_product(
            x, weight, epsilon=epsilon if isinstance(x, Unscaled) else None, gated=gated,
            dependent=dependent_launches(weight.device), workspace=workspace,
        )  # fmt: skip
    result = F.linear(rows, weight)
    return swiglu_forward(*result.chunk(2, dim=-1)) if gated else result


def product_before_norm(
    x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor, gain: torch.Tensor, epsilon: float,
    workspace: ProductWorkspace | None = None,
) -> tuple[torch.Tensor | Unscaled, torch.Tensor]:  # fmt: skip
    """(RMSNorm of the sum, the sum) of stream + x · weightᵀ; the first is for `product`.

    x: [rows, inner]; weight: [outer, inner]; stream: [rows, outer]; gain: [outer], the norm's weight.
    """
    early = dependent_launches(weight.device)
    if by_few_rows(x.shape[0], weight.dtype, architecture_of(weight.device)):
        summed, unscaled = few_rows_product(
            x, weight, residual=stream, gain=gain, dependent=early, workspace=workspace
        )  # fmt: skip
        return unscaled, summed
    return add_rms_norm_forward(F.linear(x, weight), stream, gain, epsilon, dependent=early)
