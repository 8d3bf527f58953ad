"""How many cycles each unit of a multiprocessor needs for one tile of attention: a roofline with four ceilings.

A tile has M queries, a block N keys, a head d numbers, all of 16 bits. A multiprocessor does so much in a cycle:

                     H100     B200     B300
    tensor cores     4,096    8,192    8,192    FLOPs in 16 bits
    exponentials        16       16       32
    shared memory      128      128      128    bytes
    instructions       128      128      128    threads that start one, a multiply-add for example

The forward multiplies twice (S = Q Kᵀ, O += P V), takes one exponential a score, and its tensor cores read Q, K and V
from shared memory. P and O are in tensor memory on a B200. The backward multiplies five times:

                     of its operands in shared memory     in tensor memory
    S  = Q Kᵀ        Q, K
    dP = dO Vᵀ       dO, V
    dV += Pᵀ dO      dO                                   P
    dK += dSᵀ Q      Q                                    dS
    dQ = dS K        dS, K

It also writes dS to shared memory, for the last product, and dQ in float32, which the copy engine reads again to add it
to memory. All of it for M = N = d = 128 on a B200, in cycles:

                     products    exponentials    shared memory
    forward             1,024           1,024              768
    backward            2,560           1,024            3,328    = 2,048 operands + 256 dS + 1,024 dQ

Two multiprocessors may run one product of 256 rows together. Each keeps its own rows of the first operand, and half of
the second one. The sums of dQ are over the keys, which the pair has divided: the two exchange half of dS, and then each
has half of the rows of dQ, over twice as many keys. Shared memory then takes 2,560 cycles in the backward: 1,536 for
operands, 256 to write dS, 256 to read and write the half that is exchanged, 512 for dQ. FlashAttention-4's paper gives
2,688, which this count does not reproduce. In the forward shared memory takes 512.

What the model leaves out: it takes each unit to be busy all the time, and nobody to wait for anybody.
Source: FlashAttention-4, arXiv 2603.05451.
"""

from typing import NamedTuple

INSTRUCTIONS = 128  # a cycle of a multiprocessor: four schedulers, each starts one for 32 threads
BYTES = 2  # of a number in 16 bits
FLOAT32_BYTES = 4


class Chip(NamedTuple):
    """What one multiprocessor does in a cycle."""

    flops: int
    exponentials: int
    bytes: int


class Cycles(NamedTuple):
    """How long each unit is at work for a tile."""

    products: float
    exponentials: float
    shared_memory: float

    @property
    def longest(self) -> float:
        """What the tile takes if all units work at the same time."""
        return max(self)


CHIPS = {"H100": Chip(4096, 16, 128), "B200": Chip(8192, 16, 128), "B300": Chip(8192, 32, 128)}


def forward(chip: Chip, rows: int = 128, keys: int = 128, head_dim: int = 128, *, pair: bool = False) -> Cycles:
    """Of the forward. pair: two multiprocessors run a product of 2 · rows together."""
    second = keys * head_dim / (2 if pair else 1)  # of K, and of V
    return _cycles(chip, 2 * rows * keys * head_dim, rows * keys, BYTES * (rows * head_dim + 2 * second))


def backward(chip: Chip, rows: int = 128, keys: int = 128, head_dim: int = 128, *, pair: bool = False) -> Cycles:
    """Of the backward with S transposed or not, which moves as many bytes. pair: as above."""
    of_queries, of_keys, of_scores = rows * head_dim, keys * head_dim, rows * keys
    half = 2 if pair else 1
    operands = 2 * (of_queries + of_keys / half)  # S and dP
    operands += 2 * of_queries / half  # dV and dK: dO and Q are their second operands
    operands += of_scores + of_keys  # dQ; in a pair half of the rows, twice the keys, and half of these keys' numbers
    exchanged = of_scores if pair else 0  # half of dS read for the other one, and half written by it
    gradient = 2 * FLOAT32_BYTES * of_queries / half  # dQ, written and read
    return _cycles(chip, 5 * rows * keys * head_dim, of_scores, BYTES * (operands + of_scores + exchanged) + gradient)


def with_share(cycles: Cycles, share: float, scores: int, instructions: float, others: float) -> tuple[float, float]:
    """The exponential unit's cycles, and the multiply-add unit's, if that one takes a share of the exponentials.

    Args:
        cycles: of a tile with this many scores.
        share: of the exponentials, 0 to 1.
        instructions: for an exponential by multiply-adds.
        others: instructions for each score beside its exponential: scaling, maximum, sum, conversion.
    """
    return (1 - share) * cycles.exponentials, scores * (others + share * instructions) / INSTRUCTIONS


def _cycles(chip: Chip, multiply_adds: float, exponentials: float, bytes_read: float) -> Cycles:
    return Cycles(2 * multiply_adds / chip.flops, exponentials / chip.exponentials, bytes_read / chip.bytes)
