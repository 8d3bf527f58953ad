"""Wrong answers to the exercises of chapter 09, and unusual right ones; the form is that of ch00.py.

Most are the course's own answer with one step changed, as a learner would get it wrong.
"""

from course_lib.checker.catalog import solution_source
from tests.mistakes.edits import changed

# ------------------------------------------------------------------------------------------------------------------ 9.1

PHASE = "block // stages & 1"
BUFFER = f"buffer, phase = block % stages, {PHASE}"
ASK = '"wait", "free", buffer, phase ^ 1'
READY = '"wait", "ready", buffer, phase'
FREE = 'yield "arrive", "free", buffer'

RING_WRONG = {
    "producer_waits_for_its_own_phase": changed("9.1", (ASK, '"wait", "free", buffer, phase')),
    "consumer_waits_for_the_phase_before": changed("9.1", (READY, '"wait", "ready", buffer, phase ^ 1')),
    "consumer_waits_for_the_phase_before__both_exchanged": changed(
        "9.1", (READY, '"wait", "ready", buffer, 1 - phase'), (ASK, '"wait", "free", buffer, phase')
    ),
    "parity_of_the_block": changed("9.1", (PHASE, "block & 1")),
    "parity_of_the_block__only_the_producer": changed("9.1", (ASK, '"wait", "free", buffer, (block + 1) % 2')),
    "parity_of_the_block__only_the_consumer": changed("9.1", (READY, '"wait", "ready", buffer, block % 2')),
    "parity_of_the_buffer": changed("9.1", (PHASE, "block % stages & 1")),
    "parity_never_changes": changed("9.1", (PHASE, "0")),
    "parity_never_changes__only_the_producer": changed("9.1", (ASK, '"wait", "free", buffer, 1')),
    "parity_never_changes__only_the_consumer": changed("9.1", (READY, '"wait", "ready", buffer, 0')),
    "filled_without_asking": changed("9.1", (f"        yield {ASK}\n", "")),
    "read_without_asking": changed("9.1", (f"        yield {READY}\n", "")),
    "never_freed": changed("9.1", (f"        {FREE}\n", "")),
    "freed_before_read": changed(
        "9.1", (f"        {FREE}\n", ""), ('yield "read", buffer', f'{FREE}\n        yield "read", buffer')
    ),
    "one_buffer_only": changed("9.1", ("block % stages, block // stages & 1", "0, block & 1")),
    "waits_for_its_own_copy": changed(
        "9.1", ('"load", buffer, block', '"load", buffer, block\n        yield "wait", "ready", buffer, phase')
    ),
    "last_block_missing": changed(
        "9.1",
        (f"(blocks):\n        {BUFFER}\n        yield {ASK}", f"(blocks - 1):\n        {BUFFER}\n        yield {ASK}"),
    ),
    "consumers_wait_for_ever": changed(
        "9.1", (ASK, '"wait", "free", buffer, 1'), (READY, '"wait", "ready", buffer, block & 1')
    ),
}  # fmt: skip

COUNTERS_FLIPPED = """# Exercise 9.1 · The phases of a ring
def producer(blocks, stages):
    steps, buffer, parity = [], 0, 1
    for block in range(blocks):
        steps += [("wait", "free", buffer, parity), ("load", buffer, block)]
        buffer += 1
        if buffer == stages:
            buffer, parity = 0, 1 - parity
    return steps

def consumer(blocks, stages):
    steps, buffer, parity = [], 0, 0
    for block in range(blocks):
        steps += [("wait", "ready", buffer, parity), ("read", buffer), ("arrive", "free", buffer)]
        buffer += 1
        if buffer == stages:
            buffer, parity = 0, 1 - parity
    return steps
"""

FIRST_USES_UNASKED = """# Exercise 9.1 · The phases of a ring
def producer(blocks, stages):
    for block in range(blocks):
        use = block // stages
        if use > 0:
            yield ["wait", "free", block % stages, (use - 1) % 2]
        yield ["load", block % stages, block]

def consumer(blocks, stages):
    block = 0
    while block < blocks:
        yield ["wait", "ready", block % stages, block // stages % 2]
        yield ["read", block % stages]
        yield ["arrive", "free", block % stages]
        block += 1
"""

# ------------------------------------------------------------------------------------------------------------------ 9.2

START = "min(248, 65_536 // (128 * groups) // 8 * 8)"
LEGAL = "each and sum(registers) <= groups * starting_registers(groups)"
TILE = "tile_bytes = 64 * (key_rows * (4 + item_bytes) + head_dim * 4)"
POOL = "pool = (consumers + 1) * starting_registers(consumers + 1)"

REGISTERS_WRONG = {
    "no_multiple_of_eight": changed(
        "9.2",
        (START, "min(248, 65_536 // (128 * groups))"),
        ("groups * starting_registers(groups)", "groups * (65_536 // (128 * groups) // 8 * 8)"),
        (POOL, "pool = (consumers + 1) * min(248, 65_536 // (128 * (consumers + 1)) // 8 * 8)"),
    ),
    "more_than_a_thread_may_have": changed(
        "9.2",
        (START, "65_536 // (128 * groups) // 8 * 8"),
        (POOL, "pool = (consumers + 1) * min(248, starting_registers(consumers + 1))"),
    ),
    "warps_for_groups": changed(
        "9.2",
        (START, "min(248, 65_536 // (32 * groups) // 8 * 8)"),
        ("groups * starting_registers(groups)", "groups * (65_536 // (128 * groups) // 8 * 8)"),
        (POOL, "pool = (consumers + 1) * min(248, 65_536 // (128 * (consumers + 1)) // 8 * 8)"),
    ),
    "pool_of_the_chip": changed("9.2", (LEGAL, "each and sum(registers) <= 512")),
    "pool_of_the_chip__in_registers": changed("9.2", (LEGAL, "each and 128 * sum(registers) <= 65536")),
    "multiples_of_eight_forgotten": changed("9.2", ("count % 8 == 0 and ", "")),
    "least_registers_forgotten": changed("9.2", ("24 <= count <= 256", "count <= 256")),
    "most_registers_forgotten": changed("9.2", ("24 <= count <= 256", "24 <= count")),
    "sum_must_be_equal": changed("9.2", (LEGAL, LEGAL.replace("<=", "=="))),
    "sum_forgotten": changed("9.2", (LEGAL, "each")),
    "weights_forgotten": changed("9.2", ("(4 + item_bytes)", "4")),
    "weights_in_float32": changed("9.2", ("(4 + item_bytes)", "8")),
    "accumulator_in_item_bytes": changed("9.2", ("head_dim * 4", "head_dim * item_bytes")),
    "bytes_for_registers": changed("9.2", ("tile_bytes // (128 * 4)", "tile_bytes // 128")),
    "rows_of_the_tile": changed("9.2", ("tile_bytes = 64 *", "tile_bytes = 128 *")),
    "share_not_capped": changed("9.2", ("min(256, (pool - producer) // consumers // 8 * 8)",
                                        "(pool - producer) // consumers // 8 * 8")),
    "share_no_multiple_of_eight": changed("9.2", ("consumers // 8 * 8", "consumers")),
    "producer_not_counted": changed("9.2", (POOL, "pool = consumers * starting_registers(consumers)")),
    "shared_pool_of_the_chip": changed("9.2", (POOL, "pool = 512")),
}

SEARCHED_REGISTERS = """# Exercise 9.2 · Sharing out the registers
def starting_registers(groups):
    return max(r for r in range(0, 249, 8) if r * groups * 128 <= 1 << 16)

def is_legal(registers):
    pool = starting_registers(len(registers)) * len(registers)
    for r in registers:
        if r not in range(24, 257, 8):
            return False
        pool -= r
    return pool >= 0

def live_registers(key_rows, head_dim, item_bytes):
    return key_rows / 2 + key_rows * item_bytes / 8 + head_dim / 2

def registers_of_a_consumer(consumers, producer):
    return max(r for r in range(24, 257, 8) if is_legal([r] * consumers + [producer]))
"""

# ------------------------------------------------------------------------------------------------------------------ 9.3

ROWS = "rows = 64 * consumers * query_buffers + 2 * stages * key_rows"
LOOPS = """        for query_buffers in (2, 1):
            for stages in (4, 3, 2):"""

ARRANGEMENT_WRONG = {
    "values_forgotten": changed("9.3", (ROWS, "rows = 64 * consumers * query_buffers + stages * key_rows")),
    "one_query_tile": changed("9.3", (ROWS, "rows = 64 * query_buffers + 2 * stages * key_rows")),
    "elements_for_bytes": changed("9.3", ("return rows * head_dim * item_bytes", "return rows * head_dim")),
    "query_buffers_forgotten": changed("9.3", (ROWS, "rows = 64 * consumers + 2 * stages * key_rows")),
    "output_counted": changed("9.3", (ROWS, "rows = 64 * consumers * (query_buffers + 1) + 2 * stages * key_rows")),
    "registers_ignored": changed("9.3", ("live + 24 > registers", "False")),
    "no_registers_spared": changed("9.3", ("live + 24 > registers", "live > registers")),
    "stages_before_query_buffers": changed(
        "9.3",
        (LOOPS, "        for stages in (4, 3, 2):\n            for query_buffers in (2, 1):"),
    ),
    "more_than_four_stages": changed("9.3", ("(4, 3, 2)", "range(20, 1, -1)")),
    "second_query_buffer_never_taken": changed("9.3", ("in (2, 1)", "in (1,)")),
    "second_query_buffer_insisted_on": changed("9.3", ("in (2, 1)", "in (2,)")),
}

# A slip in shared_memory reaches choose_arrangement too; these keep the second function right.
for _name in ("elements_for_bytes", "values_forgotten", "one_query_tile", "query_buffers_forgotten", "output_counted"):
    ARRANGEMENT_WRONG[_name] = ARRANGEMENT_WRONG[_name].replace(
        "if shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers) <=",
        "if (64 * consumers * query_buffers + 2 * stages * key_rows) * head_dim * item_bytes <=",
    )

SORTED_ARRANGEMENTS = """# Exercise 9.3 · 227 kilobytes
def shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    row = head_dim * item_bytes
    return sum([64 * row] * consumers * query_buffers + [key_rows * row] * 2 * stages)

def choose_arrangement(head_dim, item_bytes, consumers, registers):
    fits = [
        (n, q, s)
        for n in (64, 128, 256) for q in (1, 2) for s in (2, 3, 4)
        if shared_memory(head_dim, item_bytes, consumers, n, s, q) + 1024 <= 227 * 1024
        and n / 2 + n * item_bytes / 8 + head_dim / 2 <= registers - 24
    ]
    n, q, s = max(fits, default=(0, 0, 0))
    return [n, s, q]
"""

# ------------------------------------------------------------------------------------------------------------------ 9.4

PAIR = "return 4 * scores * head_dim / flops_per_cycle, scores / exps_per_cycle"
SHARE = "products / (max(products, exponentials) if overlapped else products + exponentials)"
BALANCED = "flops_per_cycle / (4 * exps_per_cycle)"
OWN_TIMES = ("products, exponentials = tile_cycles(1, 1, head_dim, flops_per_cycle, exps_per_cycle)",
             "products, exponentials = 4 * head_dim / flops_per_cycle, 1 / exps_per_cycle")  # fmt: skip

CYCLES_WRONG = {
    "one_product": changed("9.4", (PAIR, PAIR.replace("4 *", "2 *")), OWN_TIMES),
    "one_product__and_all_that_follows": changed(
        "9.4", (PAIR, PAIR.replace("4 *", "2 *")), (BALANCED, "flops_per_cycle / (2 * exps_per_cycle)")
    ),
    "one_product__in_the_balance": changed("9.4", (BALANCED, "flops_per_cycle / (2 * exps_per_cycle)")),
    "exponentials_of_the_output": changed(
        "9.4", (PAIR, PAIR.replace("scores / exps", "query_rows * head_dim / exps")), OWN_TIMES
    ),
    "exponential_for_every_product": changed(
        "9.4", (PAIR, PAIR.replace("scores / exps", "scores * head_dim / exps")), OWN_TIMES
    ),
    "at_once_added": changed("9.4", (SHARE, "products / (products + exponentials)")),
    "shorter_of_the_two": changed("9.4", ("max(products", "min(products")),
    "always_hidden": changed("9.4", (SHARE, "1.0 if overlapped else products / (products + exponentials)")),
    "longer_where_in_turn": changed("9.4", (SHARE, "products / max(products, exponentials)")),
    "share_of_the_exponentials": changed("9.4", ("return products / (max", "return exponentials / (max")),
    "balance_upside_down": changed("9.4", (BALANCED, "4 * exps_per_cycle / flops_per_cycle")),
}

BY_RATES = """# Exercise 9.4 · Products against exponentials
def tile_cycles(m, n, d, flops, exps):
    return [(2 * m * n * d + 2 * m * d * n) / flops, m * n / exps]

def share_of_peak(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
    ratio = balanced_head_dim(flops_per_cycle, exps_per_cycle) / head_dim
    return min(1, 1 / ratio) if overlapped else 1 / (1 + ratio)

def balanced_head_dim(flops_per_cycle, exps_per_cycle):
    return flops_per_cycle / exps_per_cycle / 4
"""

# ------------------------------------------------------------------------------------------------------------------ 9.5

ROOT = "/ math.sqrt(vectors.shape[-1])"
LARGEST = "largest = block.abs().max()"
SCALE = "scale = largest / 448 if largest > 0 else torch.ones_like(largest)"
CODES = "(block / scale).to(torch.float8_e4m3fn).float()"

NUMERICS_WRONG = {
    "not_normalised": changed("9.5", (ROOT, "")),
    "divided_by_the_size": changed("9.5", (ROOT, "/ vectors.shape[-1]")),
    "sign_changes_order": changed(
        "9.5",
        (
            "return vectors",
            "matrix = matrix[(matrix[:, 1:] != matrix[:, :-1]).sum(1).argsort()].T\n    return vectors",
        ),
    ),
    "only_one_doubling": """# Exercise 9.5 · Eight bits, and where outliers go
def hadamard(vectors):
    if vectors.shape[-1] == 1:
        return vectors
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first + second, first - second], dim=-1) / math.sqrt(2)

""" + "def quantise" + solution_source("9.5").split("def quantise")[1],
    "only_one_doubling__neighbours": """# Exercise 9.5 · Eight bits, and where outliers go
def hadamard(vectors):
    if vectors.shape[-1] == 1:
        return vectors
    first, second = vectors[..., 0::2], vectors[..., 1::2]
    return torch.stack([first + second, first - second], dim=-1).flatten(-2) / math.sqrt(2)

""" + "def quantise" + solution_source("9.5").split("def quantise")[1],
    "one_scale_for_all": changed("9.5", (LARGEST, "largest = tensor.abs().max()")),
    "sign_forgotten": changed("9.5", (LARGEST, "largest = block.max()")),
    "largest_of_another_format": changed("9.5", ("largest / 448", "largest / 240")),
    "largest_of_another_format__int8": changed("9.5", ("largest / 448", "largest / 127")),
    "largest_of_another_format__e5m2": changed("9.5", ("largest / 448", "largest / 57344")),
    "mean_for_largest": changed("9.5", (LARGEST, "largest = block.abs().mean()")),
    "scale_upside_down": changed("9.5", ("scales.append(scale)", "scales.append(1 / scale)")),
    "zeros_divided_by_zero": changed("9.5", (SCALE, "scale = largest / 448")),
    "not_rounded": changed("9.5", (CODES, "block / scale")),
    "not_rounded__to_integers": changed("9.5", (CODES, "(block / scale).round()")),
}  # fmt: skip

FAST_TRANSFORM = """# Exercise 9.5 · Eight bits, and where outliers go
def hadamard(vectors):
    result, width = vectors.clone(), 1
    while width < vectors.shape[-1]:
        pairs = result.reshape(-1, vectors.shape[-1] // (2 * width), 2, width)
        result = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        width *= 2
    return result.reshape(vectors.shape) * vectors.shape[-1] ** -0.5

def quantise(tensor, rows):
    padded = F.pad(tensor, (0, 0, 0, -len(tensor) % rows))
    blocks = padded.reshape(-1, rows, tensor.shape[1])
    scales = blocks.abs().amax((1, 2)) / 448
    scales[scales == 0] = 1
    codes = (blocks * (1 / scales[:, None, None])).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float().reshape(padded.shape)[: len(tensor)], scales
"""

SIGNS_BY_BITS = """# Exercise 9.5 · Eight bits, and where outliers go
def hadamard(vectors):
    d = vectors.shape[-1]
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(d)] for i in range(d)])
    return torch.einsum("...i,ij->...j", vectors, signs.to(vectors.dtype)) / d**0.5

def quantise(tensor, rows):
    codes, scales = [], []
    for block in tensor.split(rows):
        scale = block.abs().max() / 448
        if scale == 0:
            scale = torch.tensor(1.0)
        codes.append((block / scale).to(torch.float8_e4m3fn))
        scales.append(float(scale))
    return torch.cat([c.float() for c in codes]), torch.tensor(scales)
"""

# ------------------------------------------------------------------------------------------------------------------ 9.6

SPILLS = 'names.count("STL") + names.count("LDL")'
PREDICATE = r"(?:@!?U?P\w+\s+)?"
FLIGHT = "in_flight = min(in_flight, int(wait[1], 16))"
EXP = '"MUFU.EX2" in line and in_flight > 0'

READING_WRONG = {
    "loads_of_spills_forgotten": changed("9.6", (SPILLS, 'names.count("STL")')),
    "stores_of_spills_forgotten": changed("9.6", (SPILLS, 'names.count("LDL")')),
    "predicated_missed": changed("9.6", (PREDICATE, "")),
    "requests_only": changed("9.6", (r"USETMAXREG\S*", r"USETMAXREG\.TRY_ALLOC\S*")),
    "releases_only": changed("9.6", (r"USETMAXREG\S*", r"USETMAXREG\.DEALLOC\S*")),
    "numbers_left_as_text": changed("9.6", ("[int(count, 16) for count in registers]", "registers")),
    "numbers_read_as_decimal": changed("9.6", (r"(0x[0-9a-f]+)\s*;", r"(\d+)\s*;"), ("int(count, 16)", "int(count)")),
    "numbers_read_as_decimal__the_first_digits": changed(
        "9.6", (r"(0x[0-9a-f]+)\s*;", r"(\d+)x"), ("int(count, 16)", "int(count)")
    ),
    "any_barrier_taken": changed("9.6", (r"WARPGROUP\.DEPBAR\.LE gsb0, ", r"DEPBAR\.LE \S+, ")),
    "waits_for_all": changed("9.6", (FLIGHT, "in_flight = 0")),
    "wait_sets_the_count": changed("9.6", (FLIGHT, "in_flight = int(wait[1], 16)")),
    "waits_ignored": changed("9.6", (FLIGHT, "pass")),
    "open_group_counted": changed("9.6", (' and "gsb0" in line', "")),
    "every_special_function": changed("9.6", ('"MUFU.EX2" in line', '"MUFU" in line')),
    "all_exponentials": changed("9.6", (EXP, '"MUFU.EX2" in line')),
}

LINE_BY_LINE = """# Exercise 9.6 · Reading the machine code
def census(text):
    products, registers, spills = 0, [], 0
    for line in text.split("\\n"):
        if "HGMMA." in line:
            products += 1
        if "USETMAXREG" in line:
            registers.append(int(line.replace(";", "").split()[-1], 0))
        if " STL" in line or " LDL" in line:
            spills += 1
    return products, tuple(registers), spills

def hidden_exponentials(text):
    flying, count = 0, 0
    for line in text.split("\\n"):
        if "gsb0" in line and "DEPBAR" not in line:
            flying += 1
        if "WARPGROUP.DEPBAR" in line:
            allowed = int(line.split("gsb0,")[1].strip(" ;"), 16)
            while flying > allowed:
                flying -= 1
        count += "EX2" in line and bool(flying)
    return count
"""

# ------------------------------------------------------------------------------------------------- 9.7, on Hopper only

TILE_ROW = "[(first_tile + block) * ROWS, 0]"
ARRIVED = "mbarrier.arrive(free.index(buffer), count=1)"
LOAD = f"load_tile(source, {TILE_ROW}"
STORE = f"store_tile(target, {TILE_ROW}"
SCALED = "(tile.to(gl.float32) * factor).to(tile.dtype)"

RING_KERNEL_WRONG = {
    "factor_forgotten": changed("9.7", (SCALED, "tile")),
    "one_tile_only": changed("9.7", (LOAD, "load_tile(source, [first_tile * ROWS, 0]")),
    "first_tile_forgotten": changed("9.7", (LOAD, "load_tile(source, [block * ROWS, 0]")),
    "tiles_for_rows": changed("9.7", (LOAD, "load_tile(source, [first_tile + block, 0]")),
    "not_stored": changed("9.7", (STORE, "store_tile(target, [first_tile * ROWS, 0]")),
}

# ------------------------------------------------------------------------------------------------- 9.8, on Hopper only

RESCALED = "        accumulator = accumulator * gl.expand_dims(rescale, 1)\n        operand ="
ASKED = "        accumulator = ask_for_output(operand, accumulator, tiles, block - 1)\n"
NEW_OPERAND = "        operand = as_operand(weights, query.dtype)\n    accumulator = ask"

# The maximum, the sum and the weights are made before the product is asked for: right, but nothing overlaps.
SERIAL = """        scores = ask_for_scores(query, tiles, barriers, block, GROUP, TURNS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        accumulator = ask_for_output(operand, accumulator, tiles, block - 1)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(value_free.index((block - 1) % STAGES), count=1)
        weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)
"""


def in_the_overlapped_loop(new):
    """The course's answer with another body for the loop, up to where the accumulator is rescaled."""
    source = solution_source("9.8")
    head, tail = source.split("    for block in range(1, blocks):\n        stage = block % STAGES\n")
    rest = tail[tail.index(RESCALED) :]
    return head + "    for block in range(1, blocks):\n        stage = block % STAGES\n" + new + rest


OVERLAP_WRONG = {
    "accumulator_not_rescaled": changed("9.8", (RESCALED, "        operand =")),
    "rescaled_too_early": in_the_overlapped_loop(
        SERIAL.replace(
            "        accumulator = ask_for",
            "        later = gl.maximum(running_max, gl.max(scores, axis=1) * scale_log2)\n"
            "        accumulator = accumulator * gl.expand_dims(gl.exp2(running_max - later), 1)\n"
            "        accumulator = ask_for",
        )
        + "        rescale = gl.exp2(later - later)\n"
    ),
    "weights_of_the_wrong_block": in_the_overlapped_loop(
        SERIAL.replace(
            "        accumulator = ask_for_output(operand",
            "        ahead, _r, _m, _s = weigh(scores, running_max, running_sum, scale_log2)\n"
            "        accumulator = ask_for_output(as_operand(ahead, query.dtype)",
        )
    ),
    "first_weights_kept": changed("9.8", (NEW_OPERAND, "    accumulator = ask")),
    "output_of_the_last_block_only": in_the_overlapped_loop(
        SERIAL.replace(ASKED, "").replace("        accumulator = warpgroup_mma_wait(0, deps=[accumulator])\n", "")
    ),
}

OVERLAP_UNUSUAL = {
    "keys freed after the softmax": changed(
        "9.8",
        (
            "        mbarrier.arrive(key_free.index(stage), count=1)\n        weights, rescale",
            "        weights, rescale",
        ),
        (
            "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
            "        mbarrier.arrive(key_free.index(stage), count=1)\n"
            "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
        ),
    ),
    "the turn passed on after the scores": changed(
        "9.8",
        (
            "        if TURNS:\n            mbarrier.arrive(turns.index(1 - GROUP), count=1)\n"
            "        scores = warpgroup_mma_wait(1, deps=[scores])",
            "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
            "        if TURNS:\n            mbarrier.arrive(turns.index(1 - GROUP), count=1)\n       ",
        ),
    ),
    "the operand made before the wait": changed(
        "9.8",
        ("        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
         "        following = as_operand(weights, query.dtype)\n"
         "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here"),
        (NEW_OPERAND, "        operand = following\n    accumulator = ask"),
    ),
}  # fmt: skip

WRONG = {
    "9.1": RING_WRONG,
    "9.2": REGISTERS_WRONG,
    "9.3": ARRANGEMENT_WRONG,
    "9.4": CYCLES_WRONG,
    "9.5": NUMERICS_WRONG,
    "9.6": READING_WRONG,
    "9.7": RING_KERNEL_WRONG,
    "9.8": OVERLAP_WRONG,
}

UNUSUAL = {
    "9.1": {
        "a parity that flips, and lists": COUNTERS_FLIPPED,
        "first uses without a wait": FIRST_USES_UNASKED,
        "freed at the next turn": changed(
            "9.1",
            ('yield "read", buffer', 'yield "read", buffer\n        pass'),
            ("phase ^ 1", "1 - phase"),
        ),
    },
    "9.2": {
        "searched": SEARCHED_REGISTERS,
        "bytes at the end": changed("9.2", ("tile_bytes // (128 * 4)", "int(tile_bytes / 512)")),
        "512 as a starting point": changed("9.2", (START, "min(31, 512 // groups // 8) * 8")),
    },
    "9.3": {
        "all that fit, sorted": SORTED_ARRANGEMENTS,
        "tiles added": changed(
            "9.3", (ROWS, "rows = sum(64 for _ in range(consumers * query_buffers)) + 2 * key_rows * stages")
        ),
        "the limit in bytes": changed("9.3", ("232_448 - 1024", "231424")),
    },
    "9.4": {
        "by the balance": BY_RATES,
        "times of one score": changed("9.4", OWN_TIMES),
        "a large tile": changed("9.4", ("tile_cycles(1, 1,", "tile_cycles(128, 128,")),
    },
    "9.5": {
        "the fast transform, and blocks at once": FAST_TRANSFORM,
        "signs by common bits": SIGNS_BY_BITS,
        "float64 within": changed("9.5", (CODES, "(block.double() / scale).to(torch.float8_e4m3fn).float()")),
    },
    "9.6": {
        "line by line": LINE_BY_LINE,
        "predicates taken off first": changed("9.6", (PREDICATE, r"(?:@\S+\s+)?")),
        "booleans added": changed("9.6", ("hidden += 1", "hidden += bool(in_flight)")),
    },
    "9.7": {
        "the first uses without a wait": changed(
            "9.7",
            ("wait(free.index(buffer), phase ^ 1)", "wait(free.index(buffer), phase ^ 1, pred=block >= STAGES)"),
        ),
        "freed after the store": changed(
            "9.7",
            (f"        {ARRIVED}\n        tma", "        tma"),
            ("        fence_async_shared()\n", f"        {ARRIVED}\n        fence_async_shared()\n"),
        ),
        "waits for its store at once": changed(
            "9.7",
            ("        tma.store_wait(0)\n        outgoing", "        outgoing"),
            (f"{STORE}, outgoing)", f"{STORE}, outgoing)\n        tma.store_wait(0)"),
        ),
    },
    "9.8": OVERLAP_UNUSUAL,
}  # fmt: skip
