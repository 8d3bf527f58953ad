"""What the parts of the Hopper kernel hand each other in bundles, so that each field has its name where it is used."""

from course_lib.kernels.gluon.names import aggregate, gl, gluon


@aggregate
class Buffers:
    """Tiles in shared memory: [buffers, 1, 1, rows, columns]."""

    queries: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    outputs: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, values, outputs):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.outputs = outputs


@aggregate
class Barriers:
    """One for each buffer. *_ready: the copy engine counts its bytes. *_free: each consumer that read it says so.

    Keys and values are freed, and turns given, in every step: by named barriers, see `key_free` in `parts`.
    """

    query_ready: gl.shared_memory_descriptor
    query_free: gl.shared_memory_descriptor
    key_ready: gl.shared_memory_descriptor
    value_ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, query_ready, query_free, key_ready, value_ready):
        self.query_ready = query_ready
        self.query_free = query_free
        self.key_ready = key_ready
        self.value_ready = value_ready


@aggregate
class Tickets:
    """The numbers of the next tiles, in slots of shared memory, and each slot's two barriers."""

    slots: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots, ready, free):
        self.slots = slots
        self.ready = ready
        self.free = free


@aggregate
class Sizes:
    """The problem's sizes, and heads_at_once: as many as leave their keys and values in the L2 cache."""

    batch: gl.tensor
    query_heads: gl.tensor
    heads_per_key_head: gl.tensor
    query_length: gl.tensor
    key_length: gl.tensor
    heads_at_once: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once):
        self.batch = batch
        self.query_heads = query_heads
        self.heads_per_key_head = heads_per_key_head
        self.query_length = query_length
        self.key_length = key_length
        self.heads_at_once = heads_at_once
