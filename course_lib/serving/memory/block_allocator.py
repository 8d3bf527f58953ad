"""Sequences as block tables: memory a block at a time, shared where contents are equal, copied when one side writes.

Token i of a sequence lies in block `table[i // block_size]`, at offset `i % block_size`; its *slot* is `block *
block_size + offset`. The only memory that a sequence holds and does not fill is the end of its last block: fewer than
`block_size` slots, whatever its length.

Two ways to share. `fork` gives a child all of its parent's blocks, the partly filled last one too; whoever appends
first gets a copy of that one (copy-on-write). With `share_prefixes=True`, `add` looks up every full block of the new
prompt by its content, and takes what is there.

The caches of `course_lib.serving.caches` take any allocator that answers `append`, `table`, `free` and `free_pages` as
this one does. Those that a reader writes in exercises 6.2 and 6.6 do; a page there is a block here.

Source: Kwon et al., arXiv 2309.06180, sections 4.2 to 4.4.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from course_lib.serving.memory.block_pool import BlockPool, chain_hash
from course_lib.serving.memory.errors import DoubleFree, OutOfBlocks, UnknownSequence


@dataclass
class _Sequence:
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    key: bytes = b""  # of the last full block: the hash of all tokens in full blocks
    tail: list[int] = field(default_factory=list)  # the tokens behind the last full block
    given_back: int = 0  # how many blocks at the head are -1


class BlockAllocator:
    """Hands out blocks of a pool to sequences, and keeps their block tables.

    A call that raises has changed nothing: with OutOfBlocks the sequence is as it was, and not one of several tokens
    is appended. Keys and values must be written in the order of the calls: a block counts as filled when the call that
    fills it returns.

    Args:
        blocks: blocks in the pool.
        block_size: tokens in a block.
        share_prefixes: look up the full blocks of a new prompt by their content.

    Raises:
        ValueError: a number is not a whole one of at least 1.
    """

    def __init__(self, blocks: int, block_size: int, share_prefixes: bool = False):
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size is {block_size!r}; a block holds a whole number of tokens, at least 1.")
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self._sequences: dict[Hashable, _Sequence] = {}

    # ------------------------------------------------------------------------------------------- what there is

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """The sequences that hold memory, in the order in which they were added."""
        return tuple(self._sequences)

    def free_pages(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.free

    @property
    def reserved_slots(self) -> int:
        """Slots of all blocks in use; a shared block counts once."""
        return self.pool.in_use * self.block_size

    @property
    def used_slots(self) -> int:
        """Slots that hold a token of some sequence; a shared one counts once."""
        room = {s.blocks[-1]: -s.length % self.block_size for s in self._sequences.values() if s.blocks}
        return self.reserved_slots - sum(room.values())

    def table(self, sequence: Hashable) -> list[int]:
        """The blocks of a sequence, in the order of its tokens; -1 for those given back."""
        return list(self._state(sequence).blocks)

    def length(self, sequence: Hashable) -> int:
        """Tokens of a sequence."""
        return self._state(sequence).length

    # ------------------------------------------------------------------------------------------- what can be done

    def add(self, sequence: Hashable, tokens: int | Sequence[int]) -> int:
        """A new sequence with its prompt. Returns how many tokens at its head are in the cache already.

        With `share_prefixes` the full blocks at the head of the prompt that are in the pool already are shared: their
        keys and values need not be computed. The prompt's last token is never taken from there: someone must compute
        its query to get the next token.

        Args:
            sequence: a name that no other sequence has at the moment.
            tokens: as for `append`.

        Raises:
            ValueError: there is a sequence of that name.
            OutOfBlocks: the prompt does not fit; no sequence was added.
        """
        if sequence in self._sequences:
            raise ValueError(f"There is a sequence {sequence!r} already; append to it, free it, or take another name.")
        count, keys = self._count(tokens), list[bytes]()
        if not isinstance(tokens, int) and self.share_prefixes:
            keys = self._known_keys(tokens)
            tokens = tokens[len(keys) * self.block_size :]
        cached = len(keys) * self.block_size
        revived = sum(self.pool.is_free(key) for key in keys)
        self._check_room(sequence, self._blocks_for(count) - len(keys) + revived)
        self._sequences[sequence] = _Sequence([self.pool.reuse(key) for key in keys], cached, keys[-1] if keys else b"")
        self.append(sequence, tokens)
        return cached

    def append(self, sequence: Hashable, tokens: int | Sequence[int]) -> list[tuple[int, int]]:
        """More tokens at the end of a sequence, one or many; a sequence that holds nothing starts empty.

        Where the last block is partly filled and shared, the sequence gets a block of its own in its place.

        Args:
            sequence: its name.
            tokens: their ids, or how many there are; `share_prefixes` needs ids.

        Returns (source, target) blocks that the caller copies before it writes the tokens: one pair at most.

        Raises:
            ValueError: `tokens` is a negative number, or any number with `share_prefixes`.
            OutOfBlocks: not all of the tokens fit; none was appended.
        """
        count = self._count(tokens)
        state = self._sequences.get(sequence, _Sequence())
        write_to_shared = (
            count > 0 and state.length % self.block_size > 0 and self.pool.references(state.blocks[-1]) > 1
        )
        more = self._blocks_for(state.length + count) - len(state.blocks)
        self._check_room(sequence, more + write_to_shared)
        copies: list[tuple[int, int]] = []
        if write_to_shared:
            source, target = state.blocks[-1], self.pool.take()
            self.pool.release(source)
            state.blocks[-1] = target
            copies = [(source, target)]
        state.blocks += [self.pool.take() for _ in range(more)]
        state.length += count
        self._sequences[sequence] = state
        if not isinstance(tokens, int) and self.share_prefixes:
            self._remember(state, tokens)
        return copies

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """A child that begins with all tokens of its parent, at the cost of no block.

        Raises:
            UnknownSequence: no such parent.
            ValueError: there is a sequence with the child's name.
        """
        state = self._state(parent)
        if child in self._sequences:
            raise ValueError(f"There is a sequence {child!r} already; a child needs a name of its own.")
        gone = state.given_back
        blocks = state.blocks[:gone] + [self.pool.share(block) for block in state.blocks[gone:]]
        self._sequences[child] = _Sequence(blocks, state.length, state.key, list(state.tail), gone)

    def give_back(self, sequence: Hashable, before: int) -> None:
        """A sequence no longer needs its tokens before position `before`: the blocks that hold no other are given back.

        Their entries in its table become -1. A block that another sequence holds stays with that one.

        Raises:
            UnknownSequence: no such sequence.
            ValueError: `before` is none of its positions, nor its length.
        """
        state = self._state(sequence)
        if not 0 <= before <= state.length:
            raise ValueError(f"before is {before}; sequence {sequence!r} has {state.length} tokens.")
        for index in range(state.given_back, before // self.block_size):
            self.pool.release(state.blocks[index])
            state.blocks[index], state.given_back = -1, index + 1

    def free(self, sequence: Hashable) -> None:
        """Give back all blocks of a sequence; those that others hold stay with them.

        The last block is given back first, so that of a prompt seen before the beginning survives longest.

        Raises:
            DoubleFree: no such sequence: it was freed before, or never added.
        """
        if sequence not in self._sequences:
            raise DoubleFree(f"Sequence {sequence!r} holds no blocks: it was freed before, or never added.")
        state = self._sequences.pop(sequence)
        for block in reversed(state.blocks[state.given_back :]):
            self.pool.release(block)

    # ------------------------------------------------------------------------------------------- inside

    def _state(self, sequence: Hashable) -> _Sequence:
        if sequence not in self._sequences:
            raise UnknownSequence(f"There is no sequence {sequence!r}: it was freed before, or never added.")
        return self._sequences[sequence]

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _check_room(self, sequence: Hashable, needed: int) -> None:
        if needed > self.pool.free:
            raise OutOfBlocks(
                f"Sequence {sequence!r} needs {needed} more blocks of {self.block_size} tokens and {self.pool.free} of "
                f"{len(self.pool)} are free; free a sequence or wait until one ends."
            )

    def _known_keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the full blocks at the head of a prompt that the pool knows, leaving at least one token over."""
        keys, key = [], b""
        for start in range(0, (len(tokens) - 1) // self.block_size * self.block_size, self.block_size):
            key = chain_hash(key, tokens[start : start + self.block_size])
            if self.pool.find(key) is None:
                break
            keys.append(key)
        return keys

    def _count(self, tokens: int | Sequence[int]) -> int:
        if not isinstance(tokens, int):
            return len(tokens)
        if tokens < 0 or self.share_prefixes:
            what = "the ids of the tokens, by which prefixes are found" if self.share_prefixes else "at least 0 tokens"
            raise ValueError(f"tokens is {tokens!r}; give {what}.")
        return tokens

    def _remember(self, state: _Sequence, tokens: Sequence[int]) -> None:
        """Make the blocks known that these tokens, the last of a sequence, have filled."""
        loose = [*state.tail, *tokens]
        whole = len(loose) // self.block_size * self.block_size
        first = (state.length - len(loose)) // self.block_size
        for block, start in zip(state.blocks[first:], range(0, whole, self.block_size)):
            state.key = chain_hash(state.key, loose[start : start + self.block_size])
            self.pool.remember(block, state.key)
        state.tail = loose[whole:]
