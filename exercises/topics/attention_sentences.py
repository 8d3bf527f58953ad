"""What verdicts say of the slips of tiled attention."""

from __future__ import annotations

NO_RUNNING_MAX = (
    "This is what comes out when the exponential is taken of the scores as they are. exp overflows float32 above 88, "
    "and infinity divided by infinity is NaN. Subtract the row's running maximum first."
)

STARTS_AT_ZERO = (
    "The running maximum starts at 0, so a row whose scores all lie far below 0 is measured from 0: every exponential "
    "underflows and the sum is 0. Start it at minus infinity."
)

MAXIMUM_NOT_UPDATED = (
    "The running maximum is never updated, so it stays at minus infinity, every rescaling is by 0, and only the last "
    "tile of keys counts. End the step with running_max = new_max."
)
NOT_DIVIDED = "The accumulator is not divided by the running sum. Divide once, after the last tile."
NATURAL_EXP = "scale_log2 already holds log2(e), and the exponential is the natural one. Take tl.exp2 throughout."
LOG2E_MISSING = "The exponential is tl.exp2 and the scale lacks log2(e): 2^x is not e^x. Multiply by math.log2(math.e)."

ACCUMULATOR_NOT_RESCALED = (
    "The accumulator is not rescaled when the running maximum grows: what earlier tiles added is still measured from "
    "the old maximum. Multiply it by exp(old maximum - new maximum) before the tile's product is added."
)

SUM_NOT_RESCALED = (
    "The running sum is not rescaled when the running maximum grows. Multiply it by exp(old maximum - new maximum), "
    "the same factor that the accumulator gets."
)

NOTHING_RESCALED = (
    "Neither the sum nor the accumulator is rescaled when the running maximum grows. Each tile is then weighed from "
    "another maximum. Multiply both by exp(old maximum - new maximum)."
)
SCALE_MISSING = "The scores are not scaled. Multiply the product of queries and keys by 1/√head_dim."

SCALE_TWICE = (
    "The scores are divided by head_dim instead of its square root. Is the root missing, or is the scale applied "
    "twice, where the queries are loaded and where the scores are made?"
)

PER_TILE = (
    "Every tile is divided by its own sum and the results are added: a softmax for each tile instead of one for the "
    "row. Keep one running sum and divide once, after the last tile."
)

LAST_TILE_SKIPPED = (
    "The last tile of keys is never looked at. A loop over `range(0, key_length, tile)` covers them all; one that ends "
    "at `key_length - tile` does not."
)

FIRST_TILE_ONLY = (
    "Only the first tile of keys is used. Does the loop move on? The keys of step j begin at j times the tile's rows, "
    "and the pointers must move with it."
)

KEYS_AS_VALUES = (
    "The weights are multiplied with the keys. The second product takes the values: look at the pointer it loads from."
)

TRANSPOSED_KEY = (
    "The keys were turned by their shape and not by their strides: [keys, head_dim] was read as if memory held "
    "[head_dim, keys]. A transpose exchanges the strides (`.T`, `tl.trans`); reshape keeps the memory's order."
)

WHOLE_MATRIX = (
    "A matrix of query_length × key_length scores was allocated: that is naive attention. Hold one tile of scores at a "
    "time."
)

EMPTY_ROW = (
    "A query that sees no key at all (there are more queries than keys) has NaN for a result, or memory that nobody "
    "wrote. Its output is 0 by definition: measure such a row from 0, divide by 1 where its sum is 0, and store it too."
)

STRIDES = (
    "A tensor was read as if it were contiguous, or by another tensor's strides. Its rows lie `stride(-2)` elements "
    "apart and its heads `stride(-3)`; the launcher passes both, and the pointer arithmetic must use them."
)

MISALIGNED = (
    "The causal mask is aligned to the first key. With unequal lengths the last query stands at the last key: query i "
    "is at position i + key_length - query_length."
)

OFFSET_REVERSED = (
    "The diagonal is shifted the wrong way: query i stands at i + key_length - query_length, so with more keys than "
    "queries it sees more keys, not fewer."
)

SKIPS_TOO_MUCH = (
    "The loop over keys ends too early (or too late) when the lengths differ: its end ignores key_length - "
    "query_length. The last query of the tile decides how far to read."
)
TAIL_SCORED = (
    "The keys past the end count: their scores are 0, or another finite number, and those of real keys may be as "
    "low. Give them minus infinity."
)

TAIL_IN_THE_MAXIMUM = (
    "The keys past the end have no weight, but their scores of 0 count in the maximum, where those of real keys may be "
    "far below. Give them minus infinity before the maximum is taken."
)

WEIGHTS_OF_ANOTHER_MAXIMUM = (
    "The weights are measured from the block's maximum even where the reference was kept. Sum and output belong to the "
    "kept one: decide first, then compute the weights."
)

COMPARED_WITH_ALL_BEFORE = (
    "A block's maximum is compared with that of all blocks before. Compare it with the reference, which may lag behind "
    "by several small steps."
)
NO_CAUSAL_MASK = "Nothing is masked: every query sees the keys after it too."

OFF_BY_ONE = (
    "A query does not see the key at its own position. Causal attention hides the keys after it: the condition is <=, "
    "not <."
)

NEXT_KEY = (
    "A query sees one key too many, the one right after its own position. Compare positions with <=, and count both "
    "from 0."
)

HIDDEN_SCORED_ZERO = (
    "Hidden scores were set to 0. A score of 0 weighs exp(0 - maximum), which is not 0; the score that weighs nothing "
    "is minus infinity."
)

DIVIDED_AT_EVERY_TILE = (
    "The accumulator is divided by the running sum at every tile, and the next tile's product is added to what is an "
    "average already. Divide once, after the last tile."
)

HEAD_FORGOTTEN = (
    "Head 0 of a tensor was used for every head. Each program adds head · head stride to the pointers of query, key "
    "and value, with each tensor's own stride."
)

STORED_IN_FIRST_ROWS = (
    "Every program stores its tile in the first rows of the output, where the last one stays. The store takes the same "
    "rows as the load of the queries: tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)."
)

STORED_IN_ONE_HEAD = (
    "Every head's output was stored in head 0's place, where the last one stays. Add head · output_head_stride to the "
    "output's pointer."
)

ONLY_FIRST_HEAD = (
    "Only the first head was computed. The grid needs a second axis for the heads: (tiles of queries, heads), with the "
    "head read from tl.program_id(1)."
)

ONLY_FIRST_ROWS = (
    "Only the first tile of queries was computed. Either the grid has one program for each head, or "
    "`tl.program_id(0) * BLOCK_M` is missing from the rows."
)

READS_OUTSIDE = (
    "A load reaches memory that is not the tensor's, although all lengths are whole tiles. Where does the loop over "
    "keys end, are two strides or lengths exchanged, and does the grid have as many programs as there are tiles?"
)

WRITES_OUTSIDE = (
    "The store reaches memory that is not the output's, although all lengths are whole tiles. Does it use the output's "
    "own strides, and does the grid have as many programs as there are tiles?"
)

HALF_ACCUMULATOR = (
    "The accumulator (or the sum) is kept in float16, which ends at 65,504. Keep it in float32 over the whole loop and "
    "cast once, when the output is stored."
)

WRITES_PAST_THE_END = (
    "The output was written past its end, or into another head's rows. Is the store masked (rows < query_length and "
    "columns < head_dim), or does the store use another tensor's strides?"
)

READS_PAST_THE_END = (
    "Memory past the end of a matrix was read. Where the length is no multiple of the tile, the last tile's extra rows "
    "belong to the next head or to no tensor: mask the loads. If they are masked, are two lengths or strides exchanged?"
)

KEY_NOT_TRANSPOSED = (
    "The queries [BLOCK_M, HEAD_DIM] are multiplied with the keys as they were loaded, [BLOCK_N, HEAD_DIM]. Such a "
    "product exists only where HEAD_DIM is BLOCK_N, and is wrong there too: turn the keys over with `tl.trans`, or "
    "load them as [HEAD_DIM, BLOCK_N]."
)

VALUES_AS_KEYS = (
    "The queries are multiplied with the values. The first product takes the keys: look at the pointer it loads from."
)
SCALE_BY_LENGTH = "The scale is taken from the number of keys. It is 1/√head_dim, whatever the length."
DIVIDED_BY_MAXIMUM = "The accumulator is divided by the running maximum. It is divided by the running sum."
EVERY_SECOND_TILE = "Every second tile of keys is left out: the loop's step is twice as long as the tile that it loads."
FIRST_TILE_SKIPPED = "The first tile of keys is never looked at. The loop begins at key 0."

AS_MANY = (
    "Only as many keys were used as there are queries. The loop runs to `key_length`: is that `key.shape[1]` in the "
    "launcher?"
)
