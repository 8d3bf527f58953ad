"""The parts of a matrix product on Hopper: the order of tiles, the ring of buffers, the product, and its end.

A warp group (four warps, 128 threads) holds its part of a tile in registers, as `wgmma` leaves it: warp w has rows 16w
to 16w + 15 of every 64, and of 8 neighbouring columns thread t, of the four that share a row, has 2t and 2t + 1. So the
left half of a tile's columns lies in the same threads as the right half: to take a tile apart by columns costs nothing.
"""

from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.gluon.names import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.products import parts
from course_lib.kernels.products.epilogue import GELU_CUBE, GELU_TANH

STEP = 64  # numbers of the inner dimension at a time: 128 bytes, a row of the widest swizzle; of 8 bits twice as many


@aggregate
class Ring:
    """Buffers that are filled and freed in turn, and each one's two barriers.

    x: [stages * groups that share a tile, rows, step]; weight: [stages * parts of a tile, rows, step].
    ready: the copy engine counts its bytes. free: each warp group that read the buffer says so.
    """

    x: gl.shared_memory_descriptor
    weight: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, weight, ready, free):
        self.x = x
        self.weight = weight
        self.ready = ready
        self.free = free


@aggregate
class Output:
    """Where a consumer's pieces of the result leave: [buffers, rows, columns], and a residual's arrival in each."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, ready):
        self.tiles = tiles
        self.ready = ready


@gluon.jit
def new_output(out, BUFFERS: gl.constexpr):
    """A consumer's way out: buffers for pieces of the matrix that the descriptor `out` is of."""
    tiles = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)
    return Output(tiles, new_barriers(BUFFERS, 1))


tile_of = gluon.jit(parts.tile_of.fn)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The buffer after this one, and the parity of its use: it changes with every round."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The buffer before this one.

    Computed, not kept from the step before: Triton 3.6 takes `before = stage`, in front of a loop and in it, for one
    number that stays what it was.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def fill(x, weight, ring, stage, row, column, up_column, step):
    """Asks the copy engine for what one step of a tile needs: some numbers of its rows of x, and of the weight's rows.

    up_column: where the second part of the weight's rows begins, if there are two.
    """
    GROUPS: gl.constexpr = ring.x.shape[0] // ring.ready.shape[0]
    PARTS: gl.constexpr = ring.weight.shape[0] // ring.ready.shape[0]
    ROWS: gl.constexpr = ring.x.shape[1]
    STEP: gl.constexpr = x.block_type.shape[1]
    ready = ring.ready.index(stage)
    mbarrier.expect(ready, GROUPS * x.block_type.nbytes + PARTS * weight.block_type.nbytes)
    load_tile(weight, [column, step * STEP], ready, ring.weight.index(stage * PARTS))
    if PARTS == 2:
        load_tile(weight, [up_column, step * STEP], ready, ring.weight.index(stage * PARTS + 1))
    for group in gl.static_range(GROUPS):
        load_tile(x, [row + group * ROWS, step * STEP], ready, ring.x.index(stage * GROUPS + group))


@gluon.jit
def multiply(ring, steps_done, steps, next_turn, GROUP: gl.constexpr):
    """A warp group's part of a tile, [rows, columns] in float32; steps_done: those that the ring was used for before.

    One product runs while the next is asked for, so a buffer is freed a step after its use. next_turn: told when all
    products of the tile have been asked for, unless it is None.
    """
    STAGES: gl.constexpr = ring.ready.shape[0]
    GROUPS: gl.constexpr = ring.x.shape[0] // STAGES
    ROWS: gl.constexpr = ring.x.shape[1]
    COLUMNS: gl.constexpr = ring.weight.shape[0] // STAGES * ring.weight.shape[1]
    weights = reinterpret(ring.weight, [STAGES, COLUMNS, ring.weight.shape[2]], ring.weight.layout)
    accumulator = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    stage, phase = steps_done % STAGES, steps_done // STAGES & 1
    for step in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        x = ring.x.index(stage * GROUPS + GROUP)
        weight = weights.index(stage).permute((1, 0))
        accumulator = warpgroup_mma(x, weight, accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=[accumulator])
        mbarrier.arrive(ring.free.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    if next_turn is not None:
        mbarrier.arrive(next_turn, count=1)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    mbarrier.arrive(ring.free.index(stage_before(stage, STAGES)), count=1)
    return accumulator


@gluon.constexpr_function
def product_layout(columns):
    """Where `wgmma` leaves a product of so many columns: the four warps one below the other."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def halves(tile):
    """The left and the right half of a tile's columns; every thread has its numbers of both."""
    ROWS: gl.constexpr = tile.shape[0]
    HALF: gl.constexpr = tile.shape[1] // 2
    left, right = gl.split(tile.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    left = gl.convert_layout(left, product_layout(HALF), assert_trivial=True)
    right = gl.convert_layout(right, product_layout(HALF), assert_trivial=True)
    return left, right


@gluon.jit
def pieces_of(tile, PIECES: gl.constexpr):
    """The tile in 1, 2 or 4 pieces of as many columns, from the left."""
    pieces = (tile,)
    if PIECES == 2:
        pieces = halves(tile)
    if PIECES == 4:
        left, right = halves(tile)
        pieces = halves(left) + halves(right)
    return pieces


@gluon.jit
def add_bias(tile, bias_pointer, first_column, first_bias, columns):
    """The tile plus the bias of each of its columns, where there is one: of columns, from the first_bias-th on."""
    if bias_pointer is not None:
        COLUMNS: gl.constexpr = tile.shape[1]
        column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, tile.type.layout))
        bias = gl.load(bias_pointer + first_bias + column, mask=column < columns, other=0.0)
        tile += gl.expand_dims(bias.to(gl.float32), 0)
    return tile


@gluon.jit
def activate(tile, ACTIVATION: gl.constexpr):
    """As `epilogue.activate`, for the one activation that this kernel has: x · σ(2u)."""
    if ACTIVATION == "gelu_tanh":
        tile = tile / (1.0 + gl.exp2(-LOG2_E * GELU_TANH * (tile + GELU_CUBE * tile * tile * tile)))
    return tile


@gluon.jit
def silu(gate):
    return gate / (1.0 + gl.exp2(-LOG2_E * gate))


@gluon.jit
def ask_for_residual(residual, output, buffer, row, column):
    """Asks the copy engine for a piece of the residual, into the buffer in which the result will leave."""
    mbarrier.expect(output.ready.index(buffer), residual.block_type.nbytes)
    load_tile(residual, [row, column], output.ready.index(buffer), output.tiles.index(buffer))


@gluon.jit
def ask_for_first_pieces(residual, output, row, column):
    """Asks for as many pieces of the residual as there are buffers, once the tile before has left them."""
    BUFFERS: gl.constexpr = output.tiles.shape[0]
    PIECE: gl.constexpr = residual.block_type.shape[1]
    wait_for_stores(0)
    for buffer in gl.static_range(BUFFERS):
        ask_for_residual(residual, output, buffer, row, column + buffer * PIECE)


@gluon.jit
def finish(out, accumulator, epilogue, output, row, column, columns, tiles_done,
           ACTIVATION: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """What follows the product, and the tile's way to memory, piece by piece: no one waits for its arrival.

    A piece is written to a buffer of shared memory, from which the copy engine takes it. The buffer is written again
    when it has been read; the last ones of a tile leave while the next tile is at work.
    """
    bias_pointer, residual = epilogue
    PIECE: gl.constexpr = out.block_type.shape[1]
    if GATED:
        gate, up = halves(accumulator)
        gate = add_bias(gate, bias_pointer, column, 0, columns)
        up = add_bias(up, bias_pointer, column, columns, columns)
        accumulator = silu(gate) * up
    PIECES: gl.constexpr = accumulator.shape[1] // PIECE
    BUFFERS: gl.constexpr = output.tiles.shape[0]
    ROUNDS: gl.constexpr = PIECES // BUFFERS
    pieces = pieces_of(accumulator, PIECES)
    for index in gl.static_range(PIECES):
        piece = pieces[index]
        piece_column = column + index * PIECE
        buffer = index % BUFFERS
        tile = output.tiles.index(buffer)
        if not GATED:
            piece = activate(add_bias(piece, bias_pointer, piece_column, 0, columns), ACTIVATION)
        if residual is not None:
            mbarrier.wait(output.ready.index(buffer), tiles_done * ROUNDS + index // BUFFERS & 1)
            piece += tile.load(piece.type.layout).to(gl.float32)
        else:
            wait_for_stores(BUFFERS - 1)
        tile.store(piece.to(out.dtype))
        fence_async_shared()  # the copy engine sees what these threads wrote
        store_tile(out, [row, piece_column], tile)
        if residual is not None:
            if index + BUFFERS < PIECES:
                wait_for_stores(0)
                ask_for_residual(residual, output, buffer, row, piece_column + BUFFERS * PIECE)
