"""Where a result is wrong: a heat map of one matrix with the tile grid on it, as inline SVG.

The verdict card shows it, and so may a chapter. Errors are drawn in multiples of what the check allows, on a
logarithmic scale: pale is barely wrong, dark is wrong altogether. Cells within the tolerance stay green.
"""

from __future__ import annotations

import html

import numpy as np
import torch

RIGHT, BARELY, WRONG, LINE = "#0a8f5b", (246, 190, 140), (150, 50, 0), "#7a8290"
DECADES = 4.0  # errors from 1 to 10^4 tolerances span the colours


def error_map(
    excess: torch.Tensor,
    tile: tuple[int, int] | None = None,
    most_cells: int = 48,
    width_pixels: int = 384,
    height_pixels: int = 240,
) -> str:
    """Draw the matrix of a result that holds the most wrong elements.

    Args:
        excess: [..., rows, columns] or [columns]: error over allowed error; above 1 is wrong, NaN counts as infinite.
        tile: rows and columns of the kernel's tiles, whose edges are drawn.
        most_cells: along each side; larger matrices are shown by the worst element of each patch.
        width_pixels, height_pixels: the picture's width and height at most, so that the cases below it stay in view.

    Returns:
        SVG and a caption as HTML; "" when there is nothing to draw (a scalar, an empty tensor, no error).
    """
    if excess.dim() == 0 or excess.numel() < 2:
        return ""
    excess = torch.nan_to_num(excess.double(), nan=torch.inf, posinf=torch.inf)
    matrices = excess.reshape(-1, *excess.shape[-2:]) if excess.dim() >= 2 else excess.reshape(1, 1, -1)
    count = (matrices > 1).sum(dim=(1, 2))
    worst = int(count.argmax())
    if not int(count[worst]):
        return ""
    matrix = matrices[worst]
    rows, columns = matrix.shape
    shape = (min(rows, most_cells), min(columns, most_cells))
    grid = torch.nn.functional.adaptive_max_pool2d(matrix.clamp(max=1e30)[None, None], shape)[0, 0]
    size = max(4, min(16, width_pixels // grid.shape[1], height_pixels // grid.shape[0]))
    wide, tall = (max(size, 16) if count == 1 else size for count in (grid.shape[1], grid.shape[0]))  # strips are seen
    width, height = grid.shape[1] * wide, grid.shape[0] * tall
    squares = "".join(
        f'<rect x="{x * wide}" y="{y * tall}" width="{wide - 1}" height="{tall - 1}" {_paint(float(grid[y, x]))}/>'
        for y in range(grid.shape[0])
        for x in range(grid.shape[1])
    )
    lines = _tile_lines(tile, rows, columns, width, height) if tile else ""
    caption = html.escape(_caption(excess, matrices.shape[0], worst, (rows, columns), tuple(grid.shape), tile))
    return (
        f'<svg viewBox="-1 -1 {width + 2} {height + 2}" width="{width}" height="{height}" role="img" '
        f'aria-label="{caption}" style="display:block;max-width:100%">{squares}{lines}</svg>'
        f'<div style="opacity:.75;font-size:90%">{caption}</div>'
    )


def _paint(excess: float) -> str:
    if excess <= 1:
        return f'fill="{RIGHT}" fill-opacity="0.3"'
    depth = min(1.0, torch.tensor(excess).log10().item() / DECADES)
    colour = ",".join(str(round(a + (b - a) * depth)) for a, b in zip(BARELY, WRONG))
    return f'fill="rgb({colour})"'


def _tile_lines(tile: tuple[int, int], rows: int, columns: int, width: int, height: int) -> str:
    """Tile edges; none where they would lie closer than five pixels."""
    lines = []
    for step, count, extent, vertical in ((tile[1], columns, width, True), (tile[0], rows, height, False)):
        if step * extent / count < 5:
            continue
        for edge in range(0, count + 1, step):
            at = edge * extent / count - 0.5
            ends = (
                f'x1="{at}" x2="{at}" y1="0" y2="{height}"' if vertical else f'y1="{at}" y2="{at}" x1="0" x2="{width}"'
            )
            lines.append(f'<line {ends} stroke="{LINE}" stroke-width="1.5"/>')
    return "".join(lines)


def _caption(excess, matrices: int, worst: int, size: tuple, drawn: tuple, tile: tuple | None) -> str:
    place = ""
    if matrices > 1:
        index = np.unravel_index(worst, excess.shape[:-2])  # PyTorch's own imports SymPy: 1.7 s
        place = f"[{', '.join(str(int(i)) for i in index)}, :, :] of "
    patch = ""
    if size != drawn:
        patch = f", each square the worst of up to {-(-size[0] // drawn[0])} × {-(-size[1] // drawn[1])}"
        if excess.dim() == 1:
            patch = f", each square the worst of up to {-(-size[1] // drawn[1])}"
    edges = f"; lines are the edges of {tile[0]} × {tile[1]} tiles" if tile else ""
    shape = f"{size[1]} elements" if excess.dim() == 1 else f"{size[0]} × {size[1]}"
    return f"{place}the result, {shape}{patch}: wrong in orange, the darker the further off{edges}"
