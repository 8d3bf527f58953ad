"""What the warps of the Blackwell kernel hand each other in bundles, so that each field has a name where it stands."""

from course_lib.kernels.blackwell.names import tensor_memory_descriptor
from course_lib.kernels.gluon.names import aggregate, gl, gluon


@aggregate
class Buffers:
    """Shared memory. Tiles are [buffers, 1, 1, rows, columns]; the others hold one number a row, [2, 128]."""

    queries: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    references: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, values, factors, totals, references):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.factors = factors
        self.totals = totals
        self.references = references


@aggregate
class Columns:
    """Tensor memory, float32: scores [2, 128, BLOCK_N] and outputs [2, 128, HEAD_DIM], one of each for a tile."""

    scores: tensor_memory_descriptor
    outputs: tensor_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, scores, outputs):
        self.scores = scores
        self.outputs = outputs


@aggregate
class Barriers:
    """*_ready, *_free of keys and values: one for each buffer. The others: one for each of the two tiles."""

    query_ready: gl.shared_memory_descriptor
    key_ready: gl.shared_memory_descriptor
    key_free: gl.shared_memory_descriptor
    value_ready: gl.shared_memory_descriptor
    value_free: gl.shared_memory_descriptor
    scores_ready: gl.shared_memory_descriptor
    factors_ready: gl.shared_memory_descriptor
    weights_ready: gl.shared_memory_descriptor
    corrected: gl.shared_memory_descriptor
    output_ready: gl.shared_memory_descriptor
    totals_ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, query_ready, key_ready, key_free, value_ready, value_free,
        scores_ready, factors_ready, weights_ready, corrected, output_ready, totals_ready,
    ):  # fmt: skip
        self.query_ready = query_ready
        self.key_ready = key_ready
        self.key_free = key_free
        self.value_ready = value_ready
        self.value_free = value_free
        self.scores_ready = scores_ready
        self.factors_ready = factors_ready
        self.weights_ready = weights_ready
        self.corrected = corrected
        self.output_ready = output_ready
        self.totals_ready = totals_ready
