"""What the backward kernels share: two numbers."""

import triton.language as tl

# No tile of queries is longer; the numbers of the rows are stored for a multiple of it, so that none needs a mask.
LONGEST_QUERY_TILE = 128
# From this head dimension on, S and dP are both asked for before the exponentials: two products keep the matrix units
# busy meanwhile. Below they are too short for that, and their tiles only take registers.
WIDE = tl.constexpr(128)
