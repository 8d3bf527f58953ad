"""Chapter 04: how tiled attention is judged, from PyTorch to a kernel that is timed against FlashAttention-2."""

from exercises.tile_budgets import BUDGET
from exercises.tiled_in_pytorch import TILED
from exercises.tiling_causal import CAUSAL
from exercises.tiling_kernel import KERNEL
from exercises.tiling_lse import LSE
from exercises.tiling_race import FAST
from exercises.tiling_ragged import RAGGED

EXERCISES = (TILED, BUDGET, KERNEL, CAUSAL, RAGGED, LSE, FAST)
