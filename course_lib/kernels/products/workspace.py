"""Memory in which the parts of a product with few rows meet.

    workspace = few_rows_workspace(8, [layer.project, layer.output, layer.feed, layer.down])
    few_rows_product(x, layer.project, out, workspace=workspace)        # allocates nothing: fit for a graph

One is enough for all products of a step that run one after another: the counters are 0 before and after each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from course_lib.kernels.common.arrivals import arrival_counters
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.products.tiles import LEAST_ROWS, FewRowsTiles, few_rows_tiles


class ProductWorkspace(NamedTuple):
    """Made by `few_rows_workspace`; for one product at a time."""

    parts: torch.Tensor  # float32 [any]: tile after tile, of it part after part, [rows, tile's outer] of each
    arrivals: torch.Tensor  # int32 [tiles], all 0


def sizes_of(rows: int, outer: int, tiles: FewRowsTiles) -> tuple[int, int]:
    """How many numbers a product needs in each tensor of its workspace."""
    if tiles.splits == 1:
        return 0, 0
    programs = triton.cdiv(outer, tiles.outer)
    return programs * tiles.splits * rows * tiles.outer, programs


def few_rows_workspace(
    rows: int, weights: Sequence[torch.Tensor], tiles: FewRowsTiles | None = None
) -> ProductWorkspace:
    """A workspace for products of 1 to `rows` rows with each of these weights.

    weights: [outer, inner] each, on one device. tiles: in which all of them are cut; those that are chosen when None.
    """
    device = weights[0].device
    needed = [(0, 0)]
    for outer, inner, dtype in {(*weight.shape, weight.dtype) for weight in weights}:
        for some in {min(rows, most) for most in (LEAST_ROWS, 2 * LEAST_ROWS, rows)}:
            cut = tiles or few_rows_tiles(some, outer, inner, dtype, architecture_of(device),
                                          multiprocessor_count(device))  # fmt: skip
            needed.append(sizes_of(some, outer, cut))
    parts, arrivals = (max(sizes) for sizes in zip(*needed))
    return ProductWorkspace(torch.empty(parts, dtype=torch.float32, device=device),
                            torch.zeros(arrivals, dtype=torch.int32, device=device))  # fmt: skip


def take_workspace(workspace, rows: int, outer: int, tiles: FewRowsTiles, device) -> tuple:
    """(parts, arrivals) of a product; None each where nothing is split.

    Raises a ValueError when a given workspace does not fit.
    """
    sizes = sizes_of(rows, outer, tiles)
    if workspace is not None:
        check_workspace(workspace, sizes, device)
    if tiles.splits == 1:
        return None, None
    if workspace is not None:
        return tuple(workspace)
    parts, arrivals = sizes
    return torch.empty(parts, dtype=torch.float32, device=device), arrival_counters(arrivals, device)


def check_workspace(workspace, sizes: tuple[int, int], device) -> None:
    if not isinstance(workspace, ProductWorkspace):
        raise ValueError(f"workspace is a {type(workspace).__name__}; it must be what few_rows_workspace() returns.")
    if workspace.parts.device != device:
        raise ValueError(f"workspace is on {workspace.parts.device}; x is on {device}.")
    given = tuple(tensor.numel() for tensor in workspace)
    if any(have < need for have, need in zip(given, sizes)):
        raise ValueError(
            f"workspace has room for {given} parts and counters; this product needs {sizes}. Make it "
            "with few_rows_workspace(rows, weights) for the most rows and all the weights that it is to serve."
        )
