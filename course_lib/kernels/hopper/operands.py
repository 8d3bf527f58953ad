"""The operands of attention's two products on Hopper, in 16 and in 8 bits: how each lies, and what scales it.

`wgmma` takes its right operand from shared memory, and its left one from shared memory or registers. In 16 bits it
reads a tile in either order of its dimensions. In 8 bits the dimension that it sums over must be the inner one: for
Q Kᵀ that is the head dimension, as it lies; for P V it is the keys, so values come transposed, [HEAD_DIM, BLOCK_N].

A block's weights become the left operand of P V, and lie as its scores did. In 16 bits each thread holds what the
operand asks of it. In 8 bits it does not: of each 16 columns thread t, of four, has 2t, 2t + 1, 2t + 8 and 2t + 9, and
should have 4t to 4t + 3. A sum does not mind the order of the keys. So the weights stay where they are, under other
names, and `quantise_fp8` puts the values into that order.

8-bit numbers are codes: times a scale for each block of queries and of keys and for each channel of values. All that
this adds to the loop over keys is, for each block, the load of one number and one multiplication of it.
"""

from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon, load_tile, store_tile
from course_lib.kernels.gluon.parts import unknown

# e4m3 reaches 448, and its smallest step is 2⁻⁹: of weights up to 2⁸ more of the small ones are kept than of weights
# up to 1.
FP8_EXPONENT = 8
QUERIES_OF_A_SCALE, KEYS_OF_A_SCALE = gl.constexpr(64), gl.constexpr(128)


@gluon.constexpr_function
def weight_exponent(dtype):
    """The exponent of a row's largest weight as a power of 2; the factor cancels in the end."""
    return FP8_EXPONENT if dtype.primitive_bitwidth == 8 else 0


@gluon.jit
def query_operand(query_tiles, buffer):
    """A consumer's queries as the left operand of Q Kᵀ, [64, HEAD_DIM]."""
    if query_tiles.dtype.primitive_bitwidth == 8:
        # The compiler must not recognise the buffer from one loop to the next: ptxas 12.8 computes an address that
        # three loops share before the first of them, and leaves it undefined where that one's body never runs.
        buffer = unknown(buffer)
    return query_tiles.index(buffer).reshape([query_tiles.shape[3], query_tiles.shape[4]])


@gluon.jit
def load_values(values, batch_index, key_head, first_key, ready, tile):
    """Asks for a tile of values, [BLOCK_N, HEAD_DIM] or in 8 bits [HEAD_DIM, BLOCK_N], and returns the tile."""
    if values.dtype.primitive_bitwidth == 8:
        load_tile(values, [batch_index, key_head, 0, first_key], ready, tile)
    else:
        load_tile(values, [batch_index, key_head, first_key, 0], ready, tile)
    return tile


@gluon.jit
def right_operand(value_tile):
    """A block of values [1, 1, ..] in shared memory as the right operand of P V, [BLOCK_N, HEAD_DIM]."""
    operand = value_tile.reshape([value_tile.shape[2], value_tile.shape[3]])  # in 8 bits [HEAD_DIM, BLOCK_N]
    if value_tile.dtype.primitive_bitwidth == 8:
        operand = operand.permute((1, 0))
    return operand


@gluon.jit
def kept_weights(weights, dtype: gl.constexpr):
    """Weights [64, BLOCK_N], float32, as they wait for their product: whole registers, int32 [64, BLOCK_N / n].

    A register holds n numbers of the operand, two of 16 bits or four of 8. As such numbers they would not stay in it: a
    loop carries a tile number by number, so registers are taken apart at its end and put together at its beginning.
    """
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    if dtype.primitive_bitwidth == 8:
        # What thread t has of 16 columns, 8 b + 2 t + c, it has as the operand's columns 4 t + 2 b + c.
        by_thread = weights.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        even, odd = gl.split(by_thread.reshape([ROWS, COLUMNS // 4, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        kept = gl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }
            """, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip
    else:
        first, second = gl.split(weights.reshape([ROWS, COLUMNS // 2, 2]))
        CAST: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        kept = gl.inline_asm_elementwise(CAST, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)
    return kept


@gluon.jit
def left_operand(kept, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Kept weights as the left operand of P V, in registers: the same bits, [64, BLOCK_N] in the layout OPERAND."""
    ROWS: gl.constexpr = kept.shape[0]
    if dtype.primitive_bitwidth == 8:
        # `join` gives each number a copy of its whole register; the assembly takes the four copies as one again.
        each = gl.join(gl.join(kept, kept), gl.join(kept, kept)).reshape([ROWS, 4 * kept.shape[1]])
        each = gl.convert_layout(each, OPERAND, assert_trivial=True)
        bits = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [each], dtype=gl.int8, is_pure=True, pack=4)
    else:
        each = gl.join(kept, kept).reshape([ROWS, 2 * kept.shape[1]])
        each = gl.convert_layout(each, OPERAND, assert_trivial=True)
        bits = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [each], dtype=gl.int16, is_pure=True, pack=2)
    return bits.to(dtype, bitcast=True)


@gluon.jit
def tile_scale(scales, sizes, batch_index, head, first_query):
    """What the scores of a consumer's 64 queries are multiplied by in every block, its keys' scale apart."""
    scale_log2, query_scales, _key_scales, _value_scales = scales
    if query_scales is not None:
        blocks = gl.cdiv(sizes.query_length, QUERIES_OF_A_SCALE)
        block = gl.minimum(first_query // QUERIES_OF_A_SCALE, blocks - 1)  # a tile's last consumers may have no queries
        scale_log2 *= gl.load(query_scales + (batch_index * sizes.query_heads + head) * blocks + block)
    return scale_log2


@gluon.jit
def block_scale(scaling, block, BLOCK_N: gl.constexpr):
    """What the scores of one block of keys are multiplied by; scaling[0] is what `tile_scale` returned."""
    scale, scales, sizes, batch_index, head = scaling
    _scale_log2, _query_scales, key_scales, _value_scales = scales
    if key_scales is not None:
        key_head = (batch_index * sizes.query_heads + head) // sizes.heads_per_key_head
        row = key_scales + key_head * gl.cdiv(sizes.key_length, KEYS_OF_A_SCALE)
        scale *= gl.load(row + block * BLOCK_N // KEYS_OF_A_SCALE)
    return scale


@gluon.jit
def scale_channels(output, scales, sizes, batch_index, head):
    """A finished tile [64, HEAD_DIM] times the scale of each channel of its values."""
    _scale_log2, _query_scales, _key_scales, value_scales = scales
    if value_scales is not None:
        HEAD_DIM: gl.constexpr = output.shape[1]
        channels = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, output.type.layout))
        key_head = (batch_index * sizes.query_heads + head) // sizes.heads_per_key_head
        output *= gl.expand_dims(gl.load(value_scales + key_head * HEAD_DIM + channels), 0)
    return output


@gluon.jit
def write_rows(outputs, rows, tile, batch_index, head, first_query):
    """Hands finished rows [64, HEAD_DIM] to the copy engine, through a tile in shared memory, which it returns."""
    tile.reshape([rows.shape[0], rows.shape[1]]).store(rows.to(outputs.dtype))
    fence_async_shared()  # the copy engine sees what these threads wrote
    store_tile(outputs, [batch_index, head, first_query, 0], tile)
    return tile
