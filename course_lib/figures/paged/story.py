"""A script of operations on a real allocator, told frame by frame: what `page_table` draws."""

import dataclasses
from collections.abc import Hashable

from course_lib.serving.memory import BlockAllocator, OutOfBlocks

MOST_BLOCKS = 24
MOST_BLOCK_SIZE = 8

# Two prompts that begin alike, a sequence that is forked, one that ends, and one that takes its place.
SYSTEM_PROMPT = tuple(range(8))
STORY = (
    ("add", "A", (*SYSTEM_PROMPT, 20, 21)),
    ("add", "B", tuple(range(30, 36))),
    ("append", "A", (22, 23, 24)),
    ("add", "C", (*SYSTEM_PROMPT, 40)),
    ("fork", "B", "D"),
    ("append", "D", (50,)),
    ("append", "B", (36, 37, 38)),
    ("free", "A"),
    ("add", "E", tuple(range(60, 75))),
    ("free", "C"),
    ("add", "F", (*SYSTEM_PROMPT, 80, 81)),
)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The pool after one operation.

    Attributes:
        title: the operation, as a reader says it.
        note: what it did to the pool.
        tables: block table of each sequence, in the order in which they came.
        lengths: tokens of each sequence.
        new: blocks that this operation took or wrote to.
    """

    title: str
    note: str
    tables: dict[Hashable, tuple[int, ...]]
    lengths: dict[Hashable, int]
    new: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Story:
    """Frames of one pool, and every sequence that occurs in them, in the order of appearance."""

    blocks: int
    block_size: int
    frames: tuple[Frame, ...]
    names: tuple[Hashable, ...]


def story_of(operations=STORY, blocks: int = 12, block_size: int = 4, share_prefixes: bool = True) -> Story:
    """Run operations on a `BlockAllocator` and keep what the pool looks like after each.

    Args:
        operations: ("add", name, tokens), ("append", name, tokens), ("fork", parent, child) or ("free", name).
        blocks, block_size: the pool, of at most 24 blocks of at most 8 tokens.
        share_prefixes: as for `BlockAllocator`.

    Raises:
        ValueError: a pool that cannot be drawn, or an operation that does not exist; the message names it.
    """
    for name, value, most in (("blocks", blocks, MOST_BLOCKS), ("block_size", block_size, MOST_BLOCK_SIZE)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}; from 1 to {most} can be drawn.")
    allocator = BlockAllocator(blocks, block_size, share_prefixes)
    frames: list[Frame] = []
    names: list[Hashable] = []
    for operation, name, *rest in operations:
        if operation not in ("add", "append", "fork", "free"):
            raise ValueError(f"{operation!r} is no operation; there are add, append, fork and free.")
        free = allocator.free_pages()
        try:
            title, note, new = _perform(allocator, operation, name, *rest)
        except OutOfBlocks as refusal:
            why = str(refusal).split(";")[0].replace("block", "page")
            title, note, new = f"{name} is refused", f"{why}. Nothing has changed.", set()
        taken = free - allocator.free_pages()
        note = note.replace("{taken}", _pages(taken)).replace("{freed}", _pages(-taken))
        note = note[0].upper() + note[1:]
        names += [other for other in allocator.sequences if other not in names]
        frames.append(
            Frame(
                title,
                note,
                {other: tuple(allocator.table(other)) for other in allocator.sequences},
                {other: allocator.length(other) for other in allocator.sequences},
                frozenset(new),
            )
        )
    return Story(blocks, block_size, tuple(frames), tuple(names))


def _arrival(allocator, name: str, cached: int) -> str:
    """Which pages a new sequence found filled, and how many it took for the rest of its tokens."""
    table = allocator.table(name)
    found, rest = table[: cached // allocator.block_size], table[cached // allocator.block_size :]
    if not found:
        return f"{_pages(len(rest))} taken."
    where = f"page {found[0]}" if len(found) == 1 else f"pages {', '.join(map(str, found[:-1]))} and {found[-1]}"
    alone = [allocator.pool.references(block) == 1 for block in found]
    state = "shared from now on" if not any(alone) else "free, not overwritten" if all(alone) else "some of them free"
    return f"{cached} tokens found in {where}, {state}.\n{_pages(len(rest)).capitalize()} more taken."


def _pages(count: int) -> str:
    """As chapter 06 calls what the allocator calls blocks."""
    return "no page" if count == 0 else "1 page" if count == 1 else f"{count} pages"


def _perform(allocator, operation, name, *rest):
    """One operation: (title, note, blocks written to)."""
    if operation == "fork":
        allocator.fork(name, rest[0])
        return f"{name} is forked: {rest[0]}", "{taken} taken: both hold the same ones.", set()
    if operation == "free":
        shared = sum(allocator.pool.references(block) > 1 for block in allocator.table(name))
        allocator.free(name)
        kept = f"; {_pages(shared)} stay with others" if shared else ""
        return f"{name} ends", f"{{freed}} free again{kept}.", set()
    tokens = rest[0]
    many = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
    if operation == "add":
        cached = allocator.add(name, tokens)
        new = set(allocator.table(name)[cached // allocator.block_size :])
        return f"{name} comes with {many}", _arrival(allocator, name, cached), new
    before = allocator.length(name)
    copies = allocator.append(name, tokens)
    new = set(allocator.table(name)[before // allocator.block_size :])
    if copies:
        source, target = copies[0]
        return f"{name} gets {many}", f"Its last page was shared: {source} is copied to {target} first.", new
    return f"{name} gets {many}", "{taken} taken.", new
