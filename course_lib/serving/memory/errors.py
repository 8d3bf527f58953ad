"""What an allocator refuses. Each refusal leaves the cache as it was before the call."""


class CacheError(Exception):
    """Something about the cache's memory is not as the caller thinks."""

    __str__ = Exception.__str__  # a KeyError's would put the sentence in quotes


class CacheFull(CacheError, MemoryError):
    """No memory for what is asked: wait until a sequence ends, or preempt one."""


class OutOfBlocks(CacheFull):
    """Fewer blocks are free than the call needs."""


class NoHole(CacheFull):
    """No free run of slots is long enough, though all of them together may be."""


class RegionFull(CacheFull):
    """A sequence has filled all that was reserved for it."""


class DoubleFree(CacheError, KeyError):
    """A block or a sequence is given back that nobody holds."""


class FreedBlockUsed(CacheError):
    """A block is used that nobody holds: it may be handed to another sequence at any moment."""


class UnknownSequence(CacheError, KeyError):
    """A sequence is used that was never added, or was freed before."""
