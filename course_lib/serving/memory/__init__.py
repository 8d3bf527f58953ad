"""Where a serving system keeps its KV cache: who holds which memory, who shares it, and how much of it lies idle.

Plain Python, without tensors: an allocator deals in numbers of blocks and slots, and kernels move the bytes.

    block_pool            reference counts, free blocks, blocks known by their content
    block_allocator       sequences as block tables: append, fork with copy-on-write, shared prefixes
    contiguous_allocator  one run of slots for each sequence, reserved in advance: what paging is compared with
    whole_runs            the same in whole blocks, for the caches that a model fills
    trace                 requests with sampled lengths
    simulator             replays a trace and records what the memory holds at every step
"""

from course_lib.serving.memory.block_allocator import BlockAllocator
from course_lib.serving.memory.block_pool import BlockPool, chain_hash
from course_lib.serving.memory.contiguous_allocator import ContiguousAllocator
from course_lib.serving.memory.errors import (
    CacheError,
    CacheFull,
    DoubleFree,
    FreedBlockUsed,
    NoHole,
    OutOfBlocks,
    RegionFull,
    UnknownSequence,
)
from course_lib.serving.memory.simulator import ContiguousCache, PagedCache, Timeline, replay
from course_lib.serving.memory.trace import Request, sample_trace
from course_lib.serving.memory.whole_runs import WholeRuns

__all__ = [
    "BlockAllocator",
    "BlockPool",
    "CacheError",
    "CacheFull",
    "ContiguousAllocator",
    "ContiguousCache",
    "DoubleFree",
    "FreedBlockUsed",
    "NoHole",
    "OutOfBlocks",
    "PagedCache",
    "RegionFull",
    "Request",
    "Timeline",
    "UnknownSequence",
    "WholeRuns",
    "chain_hash",
    "replay",
    "sample_trace",
]
