"""A radix tree of prefixes: which pages hold the keys and values of which beginnings, shared by all that begin so.

An edge is a run of whole pages and the tokens in them. Keys and values of a token depend on all tokens before it, so a
page may be shared by those alone whose whole text up to its end is the same, and the way from the root to a node is
that text. A page that a sequence reads is *locked*, and so is all that stands before it. What nobody has locked stays
until memory is needed; then the leaf that was used longest ago goes first.

    tree = RadixTree(page_size=16)
    pages, node = tree.match(tokens)     # of the longest beginning that is here
    tree.lock(node)                      # nobody may take them away
    ...
    tree.insert(tokens, own_pages)       # what was computed is there for those who come after
    tree.unlock(node)
    tree.evict(3)                        # pages of what is not locked, to be used for something else

Source: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, arXiv 2312.07104, section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """The end of an edge.

    Attributes:
        tokens, pages: of the edge that leads here, page_size tokens to a page; none at the root.
        parent: the node where the edge begins, None of the root.
        children: by the tokens of their edge's first page.
        locks: sequences that read this edge.
        used: when it was last matched or inserted, by the tree's own clock.
    """

    tokens: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class RadixTree:
    """The tree, for pages of `page_size` tokens. It holds page numbers, and no memory.

    Attributes:
        evictable: pages that `evict` could give back.
        protected: pages that are locked.
    """

    def __init__(self, page_size: int):
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size is {page_size!r}; a page holds a whole number of tokens, at least 1.")
        self.page_size = page_size
        self.root = Node()
        self.evictable = self.protected = 0
        self._clock = itertools.count(1)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], Node]:
        """The pages of the longest beginning of `tokens` that is here, in whole pages, and the node where it ends.

        An edge of which only a part fits is split there, so that this part alone can be locked.
        """
        node, pages, begin = self.root, list[int](), 0
        now = next(self._clock)
        node.used = now
        while (child := self._child(node, tokens, begin)) is not None:
            same = self._same_pages(child, tokens, begin)
            if same < len(child.pages):
                child = self._split(child, same)
            child.used = now
            pages += child.pages
            begin += len(child.tokens)
            node = child
        return pages, node

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[list[int], Node]:
        """Hand the tree what a sequence has computed: `pages`, the whole pages of `tokens` from its beginning.

        Returns the pages that the tree holds for these tokens, and the node where they end. Where one of them is
        another than the sequence's own, the tree had it already: the sequence reads the tree's from now on, and its own
        is free. Raises a ValueError when the numbers of tokens and pages do not agree.
        """
        if len(pages) != len(tokens) // self.page_size:
            raise ValueError(
                f"{len(pages)} pages were given for {len(tokens)} tokens; whole pages of {self.page_size} are "
                f"{len(tokens) // self.page_size}."
            )
        held, node = self.match(tokens)
        if len(held) < len(pages):
            begin = len(held) * self.page_size
            rest = tuple(tokens[begin : len(pages) * self.page_size])
            leaf = Node(rest, list(pages[len(held) :]), node, used=node.used)
            node.children[rest[: self.page_size]] = leaf
            self.evictable += len(leaf.pages)
            held, node = held + leaf.pages, leaf
        return held, node

    def lock(self, node: Node) -> None:
        """Keep all pages from the root to this node. A sequence locks one node, where what it reads ends."""
        for step in self._up(node):
            if step.locks == 0:
                self.evictable -= len(step.pages)
                self.protected += len(step.pages)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of this node. Raises a ValueError when nobody has locked it."""
        if node is not self.root and node.locks == 0:
            raise ValueError("the node is unlocked, and nobody has locked it: it was unlocked before.")
        for step in self._up(node):
            step.locks -= 1
            if step.locks == 0:
                self.evictable += len(step.pages)
                self.protected -= len(step.pages)

    def evict(self, count: int) -> list[int]:
        """At least `count` pages that nobody has locked, or all there are: the leaves used longest ago, whole."""
        leaves = [(node.used, number, node) for number, node in enumerate(self.nodes()) if self._may_go(node)]
        heapq.heapify(leaves)
        numbers, gone = itertools.count(len(leaves)), list[int]()
        while leaves and len(gone) < count:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None  # the root is no leaf
            del parent.children[leaf.tokens[: self.page_size]]
            gone += leaf.pages
            self.evictable -= len(leaf.pages)
            if self._may_go(parent):
                heapq.heappush(leaves, (parent.used, next(numbers), parent))
        return gone

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before their children."""
        todo = [*self.root.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def _may_go(self, node: Node) -> bool:
        return node is not self.root and not node.children and node.locks == 0

    def _child(self, node: Node, tokens: Sequence[int], begin: int) -> Node | None:
        """The child whose edge begins with the page of tokens at `begin`; a page that is not whole leads nowhere."""
        page = tuple(tokens[begin : begin + self.page_size])
        return node.children.get(page) if len(page) == self.page_size else None

    def _same_pages(self, node: Node, tokens: Sequence[int], begin: int) -> int:
        """How many pages of a node's edge hold what `tokens` has from `begin` on."""
        for page in range(len(node.pages)):
            part = slice(page * self.page_size, (page + 1) * self.page_size)
            if node.tokens[part] != tuple(tokens[begin + part.start : begin + part.stop]):
                return page
        return len(node.pages)

    def _split(self, node: Node, pages: int) -> Node:
        """A node within an edge, after so many of its pages; who has locked the edge has locked both parts."""
        parent, cut = node.parent, pages * self.page_size
        assert parent is not None  # the root has no edge
        upper = Node(node.tokens[:cut], node.pages[:pages], parent, locks=node.locks, used=node.used)
        parent.children[upper.tokens[: self.page_size]] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], upper
        upper.children[node.tokens[: self.page_size]] = node
        return upper

    def _up(self, node: Node) -> Iterator[Node]:
        """This node and all before it, but for the root."""
        while node.parent is not None:
            yield node
            node = node.parent
