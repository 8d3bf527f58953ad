"""Pages for sequences whose beginnings are shared through a radix tree, and kept after a sequence has ended.

`BlockAllocator` shares what lies in full blocks by their hashes. Here the tree says more: which pages stand behind
which, so that what is given up first is always the end of a text and never its beginning.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from course_lib.serving.memory.errors import DoubleFree, OutOfBlocks, UnknownSequence
from course_lib.serving.memory.radix_tree import Node, RadixTree


@dataclass
class _Held:
    """What a sequence holds: the first `shared` of its pages belong to the tree, up to `node`, which it has locked."""

    pages: list[int]
    length: int
    shared: int
    node: Node


class PrefixAllocator:
    """Hands out pages 0 to pages - 1, each of `page_size` tokens. A call that raises has changed nothing.

    It answers `append`, `table`, `free` and `free_pages` as the caches ask for them; see `BlockAllocator`.
    """

    def __init__(self, pages: int, page_size: int):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self.pages, self.page_size = pages, page_size
        self.tree = RadixTree(page_size)
        self._free = list(range(pages - 1, -1, -1))
        self._held: dict[Hashable, _Held] = {}

    def __contains__(self, sequence: Hashable) -> bool:
        """Whether there is a sequence of that name."""
        return sequence in self._held

    def free_pages(self) -> int:
        """Pages that a sequence could get: those that nobody has, and those that the tree can give up."""
        return len(self._free) + self.tree.evictable

    def add(self, sequence: Hashable, tokens: Sequence[int]) -> int:
        """Begin a sequence with what the tree has of these tokens. Returns how many of them that are.

        The last token is never among them: somebody must compute its query to get the next one.

        Raises:
            ValueError: there is a sequence of that name.
        """
        if sequence in self._held:
            raise ValueError(f"There is a sequence {sequence!r} already; free it, or take another name.")
        pages, node = self.tree.match(tokens[: max(0, len(tokens) - 1)])
        self.tree.lock(node)
        self._held[sequence] = _Held(pages, len(pages) * self.page_size, len(pages), node)
        return len(pages) * self.page_size

    def append(self, sequence: Hashable, count: int) -> None:
        """Room for so many more tokens at the end of a sequence; one that is new begins empty.

        Raises:
            OutOfBlocks: not all of them fit, even with all that the tree can give up.
        """
        known = sequence in self._held
        held = self._held.get(sequence) or _Held([], 0, 0, self.tree.root)
        needed = -(-(held.length + count) // self.page_size) - len(held.pages)
        if needed > len(self._free) and needed > self.free_pages():
            raise OutOfBlocks(
                f"Sequence {sequence!r} needs {needed} more pages of {self.page_size} tokens, and {self.free_pages()} "
                f"of {self.pages} can be had; free a sequence or wait until one ends."
            )
        if needed > len(self._free):
            self._free += self.tree.evict(needed - len(self._free))
        if needed:
            held.pages += [self._free.pop() for _ in range(needed)]
        held.length += count
        if not known:
            self._held[sequence] = held

    def reserve(self, sequence: Hashable) -> bool:
        """Whether the next token of a sequence has a place; a page is taken for it where nobody has that page."""
        held = self._state(sequence)
        if held.length == len(held.pages) * self.page_size:
            if not self._free:
                return False
            held.pages.append(self._free.pop())
        return True

    def room(self, sequence: Hashable) -> int:
        """Tokens that `append` would have room for."""
        held = self._state(sequence)
        return (len(held.pages) + self.free_pages()) * self.page_size - held.length

    def shorten(self, sequence: Hashable, length: int) -> None:
        """Take back the room behind `length` tokens, and the pages that hold none of them."""
        held = self._state(sequence)
        if not held.shared * self.page_size <= length <= held.length:
            raise ValueError(
                f"length is {length}; sequence {sequence!r} has {held.length} tokens, and the first "
                f"{held.shared * self.page_size} are shared, so it must be between these."
            )
        held.length, pages = length, -(-length // self.page_size)
        self._free += reversed(held.pages[pages:])
        del held.pages[pages:]

    def share(self, sequence: Hashable, tokens: Sequence[int]) -> None:
        """Let others have the whole pages of a sequence's tokens, which are computed by now.

        tokens: all of them, or as many from the beginning as are computed. Where the tree had a page already, the
        sequence reads that one from now on, and its own is free.
        """
        held = self._state(sequence)
        whole = len(tokens) // self.page_size
        if whole <= held.shared:
            return
        pages, node = self.tree.insert(tokens, held.pages[:whole])
        self.tree.lock(node)  # before the old lock goes, or a page might go with it
        self.tree.unlock(held.node)
        self._free += [own for own, kept in zip(held.pages[held.shared : whole], pages[held.shared :]) if own != kept]
        held.pages[:whole], held.shared, held.node = pages, whole, node

    def free(self, sequence: Hashable) -> None:
        """Give back a sequence's pages: its own at once, shared ones once nobody reads them and memory is needed."""
        if sequence not in self._held:
            raise DoubleFree(f"Sequence {sequence!r} holds no pages: it was freed before, or never added.")
        held = self._held.pop(sequence)
        self._free += held.pages[held.shared :]
        self.tree.unlock(held.node)

    def table(self, sequence: Hashable) -> list[int]:
        """The pages of a sequence, in the order of its tokens."""
        return list(self._state(sequence).pages)

    def length(self, sequence: Hashable) -> int:
        """Tokens that a sequence has room for."""
        return self._state(sequence).length

    def _state(self, sequence: Hashable) -> _Held:
        if sequence not in self._held:
            raise UnknownSequence(f"There is no sequence {sequence!r}: it was freed before, or never added.")
        return self._held[sequence]
