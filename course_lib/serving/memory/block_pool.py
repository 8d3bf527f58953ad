"""A pool of blocks of KV cache: who holds how many references, what is free, and which contents are known.

A block is *in use* while at least one sequence holds it, and *free* otherwise. A full block may be remembered by its
content, and a free one keeps its content until it is taken for something else: a prompt seen before finds its blocks
again, as long as memory was not needed in the meantime. Blocks are taken in the order in which they became free, so
what was used longest ago is lost first.

A content's key is a hash of the block's tokens *and of all tokens before them*, because keys and values depend on the
whole prefix: the same words behind another beginning have other keys and values.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(arXiv 2309.06180), sections 4.2 and 4.4, for blocks and reference counts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from course_lib.serving.memory.errors import DoubleFree, FreedBlockUsed, OutOfBlocks


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: a hash of its tokens and of the key of the block before it (b"" for the first).

    SHA-256 and not Python's `hash`: prompts come from strangers, and one that is made to collide with another's must
    not get to read that one's memory.
    """
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Blocks 0 .. blocks-1, each with a count of the sequences that hold it.

    Args:
        blocks: how many there are.

    Raises:
        ValueError: `blocks` is not a whole number of at least 1.
    """

    def __init__(self, blocks: int):
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise ValueError(f"blocks is {blocks!r}; a pool has a whole number of blocks, at least 1.")
        self._references = [0] * blocks
        self._free: dict[int, None] = dict.fromkeys(range(blocks))  # a dict keeps the order: oldest first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that nobody holds, remembered ones among them."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds; one that is shared counts once."""
        return len(self) - self.free

    def references(self, block: int) -> int:
        """How many sequences hold a block; 0 for a free one."""
        if not 0 <= block < len(self):
            raise FreedBlockUsed(f"There is no block {block}: this pool has blocks 0 to {len(self) - 1}.")
        return self._references[block]

    def take(self) -> int:
        """A free block, now held once; what it held before is forgotten. Raises OutOfBlocks when none is free."""
        if not self._free:
            raise OutOfBlocks(f"All {len(self)} blocks are in use; free a sequence or wait until one ends.")
        block = next(iter(self._free))
        del self._free[block]
        self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more reference to a block that is in use. Raises FreedBlockUsed for one that is not."""
        self.check_in_use([block])
        self._references[block] += 1
        return block

    def release(self, block: int) -> None:
        """One reference less; without any the block is free. Raises DoubleFree when nobody holds it."""
        if self.references(block) == 0:
            raise DoubleFree(f"Block {block} is given back, and nobody holds it: it was freed before.")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None

    def remember(self, block: int, key: bytes) -> None:
        """Make a full block known by its content. The first block with that content stays the known one."""
        self.check_in_use([block])
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def is_free(self, key: bytes) -> bool:
        """Whether a block with that content is there, and no sequence holds it."""
        block = self.find(key)
        return block is not None and self.references(block) == 0

    def find(self, key: bytes) -> int | None:
        """The block with that content, in use or free; None when no block holds it any more."""
        return self._block_of.get(key)

    def reuse(self, key: bytes) -> int:
        """One more reference to the block with that content, which is taken back when it was free."""
        block = self._block_of.get(key)
        if block is None:
            raise FreedBlockUsed("No block holds that content any more; look it up with `find` before.")
        self._free.pop(block, None)
        self._references[block] += 1
        return block

    def check_in_use(self, blocks: Iterable[int]) -> None:
        """Raises FreedBlockUsed when a block of a table is held by nobody, or does not exist."""
        for block in blocks:
            if self.references(block) == 0:
                raise FreedBlockUsed(
                    f"Block {block} is free: whoever reads or writes it meets another sequence's tokens sooner or "
                    "later. Ask the allocator for the table again."
                )

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
