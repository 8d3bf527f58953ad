"""The parts that Gluon kernels of several topics are made of: sums and maxima of a row by its threads, and barriers.

The result of `wgmma` lies in registers as the hardware prescribes (`NVMMADistributedLayout`): a warp holds 16 rows, and
of each row four neighbouring threads hold all the columns.
"""

from course_lib.kernels.gluon.names import gl, gluon, mbarrier

# A program has 16 named barriers. Triton takes 0, 1, and one for each partition of warps but the first. With up to five
# partitions these are 0 to 5, and 6 to 15 are free.
FIRST_NAMED_BARRIER = gl.constexpr(6)
NAMED_BARRIERS = 10


@gluon.jit
def row_max(scores):
    """The maximum of each row: [64, BLOCK_N] -> [64].

    A maximum takes a few cycles before the next can use it. Along a row they would all wait for one another; here a
    thread has four for a row under way, and joins them at the end.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    by_sixteen = gl.max(scores.reshape([scores.shape[0], scores.shape[1] // 16, 16]), axis=1)
    return gl.convert_layout(gl.max(by_sixteen, axis=1), ROWS, assert_trivial=True)


@gluon.jit
def sum_by_thread(weights):
    """The sums of a row's weights, one for each of the four threads that hold it: [64, BLOCK_N] -> [64, 4]."""
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    by_thread = weights.reshape([ROWS, COLUMNS // 8, 4, 2])  # wgmma deals a row's columns out in pairs
    return gl.sum(gl.sum(by_thread, axis=3), axis=1)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory, each of which completes a phase after that many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def arrive_named(number, THREADS: gl.constexpr):
    """The warps of this group arrive at a named barrier, each for itself, and go on; THREADS arrivals open it.

    `mbarrier.arrive` speaks for the whole group: all its warps meet first, and ptxas moves little across such a
    meeting. By name no warp waits for the others of its group; only a group that waits at the barrier waits for all.
    """
    TEXT: gl.constexpr = named_barrier_text("bar.arrive", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_named(number, THREADS: gl.constexpr):
    """The same, and waits until it opens: for THREADS arrivals, those of this group among them."""
    TEXT: gl.constexpr = named_barrier_text("bar.sync", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def named_barrier_text(instruction, threads):
    """The assembly: the barrier's number is the operand, and the result, which nobody wants."""
    return f"{instruction} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def unknown(number):
    """The same number, of which the compiler knows nothing any more."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
