"""Where the tokens of a sequence lie in a pool of pages, for tiles of positions: what paged kernels share."""

import triton
import triton.language as tl


@triton.jit
def load_page_numbers(table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page [BLOCK_N] of each position from `start` on, of a sequence with this block table; 0 from `end` on."""
    positions = start + tl.arange(0, BLOCK_N)
    return tl.load(table + positions // PAGE_SIZE, mask=positions < end, other=0)


@triton.jit
def page_rows(pages, positions, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """How far from the first page [BLOCK_N] the rows of these positions begin, in elements, given their pages."""
    return pages.to(tl.int64) * page_stride + positions % PAGE_SIZE * token_stride
