"""Thousands of operations in any order: no block is lost, shared wrongly or freed twice, and no token is overwritten.

A model of the memory runs beside the allocator: slots that hold what was written to them. Every sequence must read its
own tokens back at any time.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from course_lib.serving.memory import BlockAllocator, DoubleFree, OutOfBlocks, UnknownSequence

BLOCKS, BLOCK_SIZE = 12, 3
TOKENS = st.lists(st.integers(0, 1), max_size=10)  # two tokens only, so that prompts often begin alike


class Serving(RuleBasedStateMachine):
    share_prefixes = False
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS, BLOCK_SIZE, share_prefixes=self.share_prefixes)
        self.memory = [None] * (BLOCKS * BLOCK_SIZE)
        self.tokens = {}  # what each sequence should read
        self.names = 0

    def name(self):
        self.names += 1
        return self.names

    def write(self, name, tokens, copies=()):
        """The last tokens of a sequence go to where its table says, behind what was copied."""
        for source, target in copies:
            for offset in range(BLOCK_SIZE):
                self.memory[target * BLOCK_SIZE + offset] = self.memory[source * BLOCK_SIZE + offset]
        table, length = self.allocator.table(name), self.allocator.length(name)
        for place, token in zip(range(length - len(tokens), length), tokens):
            self.memory[table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = token

    def seen(self):
        pool = self.allocator.pool
        return (
            {name: (self.allocator.table(name), self.allocator.length(name)) for name in self.tokens},
            [pool.references(block) for block in range(BLOCKS)],
            self.allocator.free_pages(),
        )

    @rule(target=sequences, tokens=TOKENS)
    def add(self, tokens):
        name, before = self.name(), self.seen()
        try:
            cached = self.allocator.add(name, tokens)
        except OutOfBlocks:
            assert self.seen() == before and name not in self.allocator.sequences
            return multiple()
        self.write(name, tokens[cached:])
        self.tokens[name] = tokens
        return name

    @rule(name=sequences, tokens=TOKENS)
    def append(self, name, tokens):
        before = self.seen()
        try:
            copies = self.allocator.append(name, tokens)
        except OutOfBlocks:
            assert self.seen() == before
            return
        self.write(name, tokens, copies)
        self.tokens[name] = self.tokens[name] + tokens

    @rule(target=sequences, parent=sequences)
    def fork(self, parent):
        child, free = self.name(), self.allocator.free_pages()
        self.allocator.fork(parent, child)
        assert self.allocator.free_pages() == free
        self.tokens[child] = self.tokens[parent]
        return child

    @rule(name=consumes(sequences))
    def free(self, name):
        self.allocator.free(name)
        del self.tokens[name]
        with pytest.raises(DoubleFree):
            self.allocator.free(name)
        with pytest.raises(UnknownSequence):
            self.allocator.table(name)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for name, tokens in self.tokens.items():
            table = self.allocator.table(name)
            assert self.allocator.length(name) == len(tokens) and len(table) == -(-len(tokens) // BLOCK_SIZE)
            read = [self.memory[table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE] for i in range(len(tokens))]
            assert read == tokens

    @invariant()
    def references_are_the_tables_that_hold_a_block(self):
        held = [block for name in self.tokens for block in self.allocator.table(name)]
        pool = self.allocator.pool
        assert [pool.references(block) for block in range(BLOCKS)] == [held.count(block) for block in range(BLOCKS)]
        assert self.allocator.free_pages() == BLOCKS - len(set(held)), "a block is lost"
        pool.check_in_use(held)

    @invariant()
    def used_slots_are_those_that_hold_a_token(self):
        slots = {
            (self.allocator.table(name)[i // BLOCK_SIZE], i % BLOCK_SIZE)
            for name, tokens in self.tokens.items()
            for i in range(len(tokens))
        }
        assert self.allocator.used_slots == len(slots)

    @invariant()
    def a_block_that_is_known_by_its_content_holds_it(self):
        pool = self.allocator.pool
        assert {key: pool.find(key) for key in pool._key_of.values()} == pool._block_of
        assert len(pool._key_of) == len(pool._block_of)


class ServingWithSharedPrefixes(Serving):
    share_prefixes = True


THOROUGH = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestServing = Serving.TestCase
TestServing.settings = THOROUGH
TestServingWithSharedPrefixes = ServingWithSharedPrefixes.TestCase
TestServingWithSharedPrefixes.settings = THOROUGH
