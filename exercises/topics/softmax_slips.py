"""The slips of running statistics in words, the most basic first; `running.py` says what each of them does."""

NO_MAXIMUM = (
    "This is what the exponentials give when no maximum is subtracted: above 88.7 float32 overflows to inf, and "
    "below -104 it underflows to 0. Subtract the row's maximum before every exp."
)
STARTS_AT_ZERO = (
    "The maximum starts at 0, so a row of negative scores is measured from 0 and not from its own maximum; far below, "
    "all its terms underflow. Start at -inf, or with the first tile's maximum."
)
TURNED_ROUND = (
    "The factor is exp(new maximum - old maximum). What was added before has to shrink when the maximum grows: it is "
    "exp(old maximum - new maximum)."
)
NAN_FROM_THE_START = (
    "Every element is NaN, so the running values were NaN after the first tile already. Before it the maximum is -inf "
    "and the sum 0, and the factor exp(old maximum - new maximum) is exp(-inf) = 0. Is the difference the other way "
    "round (0 times exp(+inf) is NaN), is the exp missing, does the maximum start at +inf, or are the weights measured "
    "from the old one?"
)
NOTHING_FINITE = (
    "No element is finite, so the running values were NaN or infinite from the first tile on. Is running_max updated "
    "at the end of each step, and does it start at -inf? Is the factor exp(old maximum - new maximum), with the exp "
    "and not the other way round, and are the weights measured from the new one?"
)
FINITE_START = (
    "The running maximum starts at a finite number. A row of nothing but -inf then keeps that number as its maximum, "
    "where -inf is asked for."
)
MINIMUM = "The smallest score of a tile is taken where the largest belongs, so that exp of the others can overflow."
MAGNITUDES = (
    "The maximum is that of the absolute values. Where all scores of a row are negative it lies far above them, and "
    "their exponentials underflow: take the largest score, with its sign."
)
MAXIMUM_FORGETS = (
    "The new maximum is the tile's own, even where an earlier tile held a larger score. Then exp(old maximum - new "
    "maximum) grows without bound. Take the larger of the running one and the tile's."
)
OLD_MAXIMUM = (
    "The weights are measured from the maximum before this tile, and the sum from the one after it. Use the new "
    "maximum in both."
)
SUM_NOT_RESCALED = (
    "The maximum grew and the sum stayed: earlier terms are still measured from the old maximum. Multiply the running "
    "sum by exp(old maximum - new maximum) at every tile. If you do, look at the order: once running_max has been "
    "overwritten, that factor is exp(0) = 1."
)
RESCALED_AFTER_ADDING = (
    "The running sum is rescaled after the tile's weights were added. They are measured from the new maximum already: "
    "rescale first, then add."
)
TILE_NOT_RESCALED = (
    "Each tile's sum was taken relative to the tile's own maximum and added as it is. Subtract the new running maximum "
    "instead, which the tile before may have set."
)
LAST_TILE_ONLY = (
    "Only the last tile counted. Either what was kept is overwritten at each tile instead of carried on, or every "
    "rescaling is by 0: running_max is never updated and stays at -inf."
)
EMPTY_STATE = (
    "A tile of nothing but -inf gave NaN: there the maximum is -inf, and -inf - (-inf) is NaN. Where the new maximum "
    "is -inf, subtract 0 instead."
)
BOUNDED_BELOW = (
    "What is subtracted is bounded from below by a finite number. All scores of a row may lie below that number, and "
    "then every weight is 0. Replace -inf alone: `where(maximum == -inf, 0, maximum)`."
)
REPAIRED_LATE = (
    "NaN is replaced only at the end. A tile of nothing but -inf makes the running sum NaN, and what comes after it "
    "is lost. Subtract 0 where the new maximum is -inf, at every tile."
)
ONE_MAXIMUM = (
    "One maximum was taken over all rows of a tile. It does not overflow, but a row that lies far below the largest "
    "one underflows to zeros. Every row needs its own: `amax(dim=1)`."
)
ALL_ROWS_SUMMED = (
    "The sum was taken over all rows together. Every row has a sum of its own: `sum(dim=1)`, which keeps one number a "
    "row."
)
EXP2 = (
    "The exponentials are powers of 2 where e belongs. Take exp, or multiply the scores by log2(e) first, and the "
    "maximum with them."
)
EXP2_IN_ONE = (
    "The weights and the factor exp(old maximum - new maximum) are powers of different numbers: one of 2, the other of "
    "e. Take exp in both; or multiply the scores by log2(e) first, and take exp2 in both."
)
WEIGHTS_CAST = (
    "The weights are rounded to 16 bits before they are added, and the sum takes their rounding errors in. Keep them "
    "in float32."
)
SUM_CAST = (
    "The running sum is kept in 16 bits: float16 ends at 65,504 and stops growing by ones at 2048. Convert the tile to "
    "float32 when it is loaded, and keep the statistics there."
)
TILE_NOT_CONVERTED = (
    "Tiles of 16 bits are used as they come, so maximum and sum are rounded to 16 bits at every step. Convert each "
    "tile to float32 first."
)
HALF_PRECISION = (
    "The float16 cases come out with float16's precision where float32 is asked for: something on the way is rounded "
    "to float16. Look at the tile, the weights, the sum, and all that is kept from one step to the next."
)
KEPT_THE_TILES = (
    "Tiles were kept and used after the next one had arrived. There is one buffer on chip and every tile overwrites "
    "the one before it, so a list of tiles holds the last one many times. Take from each tile what you need while it "
    "is there."
)
ROW_STRIDE = (
    "Rows of `x` are read as if they followed each other without a gap. Row r begins at r times its row stride."
)
LOAD_NOT_MASKED = (
    "A load reaches memory that is not the row's: positions past its end. Mask it with `offsets < columns` and "
    '`other=float("-inf")`. If it is masked, are two lengths or strides exchanged, or the grid\'s axes?'
)
STORE_NOT_MASKED = (
    "A store goes past the end of a row, to memory that is not the result's. Mask it with `offsets < columns`. "
    "If it is masked, are two lengths or strides exchanged, or the grid's axes?"
)
TAIL_SCORED = (
    "The positions past the end of the row were scored as zeros, and each added exp(0 - maximum) to the sum. Load "
    'them as `other=float("-inf")`, or set their weights to 0.'
)
TAIL_FINITE = (
    "The positions past the end of the row hold a large negative number where -inf belongs. In a row whose scores lie "
    'further below, that number is the maximum. Load them as `other=float("-inf")`.'
)
PARTLY_GUARDED = (
    "-inf - (-inf) still gives NaN: it is guarded at the first tile alone, and a row may hold nothing but -inf for "
    "several tiles. Subtract 0 wherever the new maximum is -inf."
)
