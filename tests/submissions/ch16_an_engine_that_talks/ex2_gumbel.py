"""Wrong answers to exercise 16.2, and unusual right ones."""

from tests.submissions.edits import changed

U = "((bits >> 9).to(tl.float32) + 0.5) / 8388608.0"
NOISE, SCORES = "-tl.log(-tl.log(u))", "logits / temperature + noise  #"
WORD, BITS = "mix(mix(seed) ^ position)", "mix(row_word ^ token)"
SEED, POSITION = "tl.load(seeds_pointer + row)", "tl.load(positions_pointer + row)"
GREEDY = "        if temperature > 0:\n"
BEST = "        if score > best:\n"
BLOCK = "block = min(1024, triton.next_power_of_2(vocabulary))"
LAST = "best, drawn = score, start + place"
CALL = "    rows, vocabulary = logits.shape\n"

MIX = """# Exercise 16.2 · A draw without a softmax
@triton.jit
def mix(word):
    word = word.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)

"""
SPLIT = (
    MIX
    + """
@triton.jit
def blocks_kernel(logits, temperatures, seeds, positions, scores, tokens, vocabulary, stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + t, mask=t < vocabulary, other=float("-inf")).to(tl.float32)
    bits = mix(mix(mix(tl.load(seeds + row)) ^ tl.load(positions + row)) ^ t)
    u = ((bits >> 9).to(tl.float32) + 0.5) * (1 / 8388608)
    score = x - tl.load(temperatures + row) * tl.log(-tl.log(u))
    tl.store(scores + row * tl.num_programs(1) + block, tl.max(score, axis=0))
    tl.store(tokens + row * tl.num_programs(1) + block, block * BLOCK + tl.argmax(score, axis=0))

@triton.jit
def best_kernel(scores, tokens, chosen, blocks, BLOCKS: tl.constexpr):
    row, b = tl.program_id(0), tl.arange(0, BLOCKS)
    score = tl.load(scores + row * blocks + b, mask=b < blocks, other=float("-inf"))
    tl.store(chosen + row, tl.load(tokens + row * blocks + tl.argmax(score, axis=0)))

def sample(logits, temperatures, seeds, positions):
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, 2048)
    scores = torch.empty(rows, blocks, device=logits.device)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    blocks_kernel[(rows, blocks)](logits, temperatures, seeds, positions, scores, tokens, vocabulary,
                                  logits.stride(0), BLOCK=2048)
    best_kernel[(rows,)](scores, tokens, chosen, blocks, BLOCKS=triton.next_power_of_2(blocks))
    return chosen
"""
)

ROWS_AT_ONCE = (
    MIX
    + """
@triton.jit
def kernel(logits, temperatures, seeds, positions, tokens, rows, vocabulary, stride, R: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    real = row < rows
    temperature = tl.load(temperatures + row, mask=real, other=1.0)
    word = mix(mix(tl.load(seeds + row, mask=real, other=0)) ^ tl.load(positions + row, mask=real, other=0))
    best = tl.full([R], float("-inf"), tl.float32)
    drawn = tl.zeros([R], tl.int32)
    for start in range(0, vocabulary, B):
        t = start + tl.arange(0, B)[None, :]
        x = tl.load(logits + row[:, None] * stride + t, mask=real[:, None] & (t < vocabulary), other=float("-inf"))
        u = ((mix(word[:, None] ^ t) >> 9).to(tl.float32) + 0.5) / 8388608
        cold = temperature[:, None] == 0
        score = x / tl.where(cold, 1.0, temperature[:, None]) - tl.where(cold, 0.0, tl.log(-tl.log(u)))
        top = tl.max(score, axis=1)
        place = tl.min(tl.where(score == top[:, None], t, 2147483647), axis=1)
        drawn = tl.where(top > best, place, drawn)
        best = tl.maximum(top, best)
    tl.store(tokens + row, drawn, mask=real)

def sample(logits, temperatures, seeds, positions):
    rows, vocabulary = logits.shape
    tokens = torch.empty_like(seeds)
    kernel[(triton.cdiv(rows, 4),)](logits, temperatures, seeds, positions, tokens, rows, vocabulary, logits.stride(0),
                                    R=4, B=256)
    return tokens
"""
)

EXPONENTIAL = (
    MIX
    + """
@triton.jit
def kernel(logits, temperatures, seeds, positions, tokens, vocabulary, stride, BLOCK: tl.constexpr):
    row, t = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + t, mask=t < vocabulary, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    largest = tl.max(x, axis=0)
    if temperature > 0:
        u = ((mix(mix(mix(tl.load(seeds + row)) ^ tl.load(positions + row)) ^ t) >> 9).to(tl.float32) + 0.5) / 8388608
        x = tl.exp2((x - largest) * (1.4426950408889634 / temperature)) / -tl.log2(u)
    tl.store(tokens + row, tl.argmax(x, axis=0))

def sample(logits, temperatures, seeds, positions):
    rows, vocabulary = logits.shape
    tokens = torch.empty_like(seeds)
    kernel[(rows,)](logits, temperatures, seeds, positions, tokens, vocabulary, logits.stride(0),
                    BLOCK=triton.next_power_of_2(vocabulary))
    return tokens
"""
)

WRONG = {
    # sglang#25133: a hash divided by 2³² - 1, and token 1208 won at seed 7847 and position 12345.
    "u_reaches_an_end__both": changed("16.2", (U, "bits.to(tl.float32) / 4294967295.0")),
    "u_reaches_an_end": changed("16.2", (U, "(bits.to(tl.float32) + 0.5) / 4294967296.0")),
    "u_reaches_an_end__24_bits": changed("16.2", (U, "((bits >> 8).to(tl.float32) + 0.5) / 16777216.0")),
    "u_reaches_an_end__0": changed("16.2", (U, "(bits >> 9).to(tl.float32) / 8388608.0")),
    "u_reaches_an_end__0_of_24_bits": changed("16.2", (U, "(bits >> 8).to(tl.float32) / 16777216.0")),
    "u_of_another_range": changed("16.2", ("bits >> 9", "bits >> 8")),
    "u_of_another_range__signed": changed("16.2", ("bits >> 9", "bits.to(tl.int32, bitcast=True) >> 9")),
    # vllm-omni#4261, tt-metal#52973: one stream of noise for the batch; vllm-ascend#9173: temperatures of other rows.
    "row_0_for_all": changed("16.2", (SEED, "tl.load(seeds_pointer)")),
    "row_0_for_all__position": changed("16.2", (POSITION, "tl.load(positions_pointer)")),
    "row_0_for_all__seed_and_position": changed(
        "16.2", (SEED, "tl.load(seeds_pointer)"), (POSITION, "tl.load(positions_pointer)")
    ),
    "row_0_for_all__temperature": changed("16.2", ("temperatures_pointer + row", "temperatures_pointer")),
    "position_ignored": changed("16.2", (WORD, "mix(seed)")),
    "position_ignored__mixed": changed("16.2", (WORD, "mix(mix(seed))")),
    "seed_ignored": changed("16.2", (WORD, "mix(position)")),
    "row_in_the_noise": changed("16.2", (SEED, "row")),
    "row_in_the_noise__flat": changed("16.2", ("row_word ^ token", "row_word ^ (row * vocabulary + token)")),
    "row_in_the_noise__added": changed("16.2", ("mix(seed)", "mix(seed + row)")),
    "other_hash": changed("16.2", (WORD, "mix(mix(position) ^ seed)")),
    "other_hash__joined": changed("16.2", (WORD, "mix(seed ^ position)")),
    "other_hash__sum": changed("16.2", (WORD, "mix(mix(seed) + position)"), (BITS, "mix(row_word + token)")),
    "no_noise__not_mixed": changed("16.2", (BITS, "row_word ^ token")),
    "noise_of_the_block": changed("16.2", (BITS, "mix(row_word ^ tl.arange(0, BLOCK))")),
    "noise_of_the_block__256": changed(
        "16.2", (BITS, "mix(row_word ^ tl.arange(0, BLOCK))"), ("min(1024,", "min(256,")
    ),
    "no_noise": changed("16.2", (SCORES, "logits / temperature  #")),
    "no_noise__one_for_the_row": changed("16.2", (BITS, "mix(row_word)")),
    "temperature_misplaced__after_the_noise": changed("16.2", (SCORES, "(logits + noise) / temperature  #")),
    "temperature_misplaced__nowhere": changed("16.2", (SCORES, "logits + noise  #")),
    "temperature_misplaced": changed("16.2", (SCORES, "logits * temperature + noise  #")),
    "temperature_limited": changed("16.2", (GREEDY, "        if temperature > 0.015:\n")),
    "temperature_limited__50": changed(
        "16.2", ("tl.load(temperatures_pointer + row)", "tl.minimum(tl.load(temperatures_pointer + row), 50.0)")
    ),
    "rounded_to_16_bits": changed(
        "16.2", (SCORES, "(logits / temperature).to(logits_pointer.dtype.element_ty).to(tl.float32) + noise  #")
    ),
    "top_bit_lost": changed("16.2", ("mix(seed)", "mix(seed & 0x7FFFFFFF)")),
    "top_bit_lost__position": changed("16.2", ("^ position)", "^ (position & 0x7FFFFFFF))")),
    "logits_cut_off": changed(
        "16.2", ("        scores = logits\n", "        logits = tl.where(inside, tl.maximum(logits, -60000.0), "
        'float("-inf"))\n        scores = logits\n'),
    ),
    "other_noise": changed("16.2", (NOISE, "tl.log(-tl.log(u))")),
    "other_noise__subtracted": changed("16.2", (SCORES, "logits / temperature - noise  #")),
    "noise_is_nan": changed("16.2", (NOISE, "-tl.log(tl.log(u))")),
    "other_noise__one_logarithm": changed("16.2", (NOISE, "-tl.log(u)")),
    "other_noise__end": changed("16.2", (NOISE, "-tl.log(-tl.log(1 - u))")),
    "divided_by_0": changed("16.2", (GREEDY, "        if temperature >= 0:\n")),
    "greedy_with_noise": changed(
        "16.2", (GREEDY, "        if True:\n"),
        (SCORES, "logits / tl.where(temperature > 0, temperature, 1) + noise  #"),
    ),
    "greedy_with_noise__small": changed(
        "16.2", (GREEDY, "        if True:\n"), (SCORES, "logits / tl.maximum(temperature, 1e-6) + noise  #")
    ),
    "later_tie": changed("16.2", (BEST, "        if score >= best:\n")),
    "later_tie__in_a_block": changed(
        "16.2", (BEST, "        place = tl.max(tl.where(scores == score, tl.arange(0, BLOCK), 0), axis=0)\n" + BEST),
        (BEST, "        if score >= best:\n"),
    ),
    "last_block_only": changed("16.2", (BEST, "        if True:\n")),
    "last_block_only__maximum_not_kept": changed("16.2", (LAST, "drawn = start + place")),
    "first_block_only": changed("16.2", ("range(0, vocabulary, BLOCK)", "range(0, BLOCK, BLOCK)")),
    "place_in_the_block": changed("16.2", ("start + place", "place")),
    "best_begins": changed("16.2", ('tl.full([], float("-inf"), tl.float32)', "tl.full([], 0.0, tl.float32)")),
    "best_begins__1e6": changed("16.2", ('tl.full([], float("-inf"), tl.float32)', "tl.full([], -1.0e6, tl.float32)")),
    "lanes_behind_the_end": changed("16.2", ('mask=inside, other=float("-inf")', "mask=inside, other=0.0")),
    "lanes_behind_the_end__1024": changed(
        "16.2", ('mask=inside, other=float("-inf")', "mask=inside, other=0.0"), (BLOCK, "block = 1024")
    ),
    "row_stride_ignored": changed("16.2", ("row * row_stride", "row * vocabulary")),
    "offset_in_32_bits": changed("16.2", (".to(tl.int64)", "")),
    "fixed_size": changed("16.2", ("kernel[(rows,)]", "kernel[(min(rows, 128),)]")),
    "fixed_size__tile": changed(
        "16.2", (BLOCK, "block = min(131072, triton.next_power_of_2(vocabulary))"),
        ("range(0, vocabulary, BLOCK)", "range(0, BLOCK, BLOCK)"),
    ),
    "too_many_bytes": changed(
        "16.2", ("    for start in range(0, vocabulary, BLOCK):\n",
        "    largest = best\n    for start in range(0, vocabulary, BLOCK):\n"
        "        token = start + tl.arange(0, BLOCK)\n"
        "        logits = tl.load(logits_pointer + row * row_stride + token, mask=token < vocabulary, "
        'other=float("-inf"))\n        largest = tl.maximum(largest, tl.max(logits.to(tl.float32), axis=0))\n'
        "    for start in range(0, vocabulary, BLOCK):\n"),
        (SCORES, "(logits - largest) / temperature + noise  #"),
    ),
    "copied_by_pytorch": changed("16.2", (CALL, CALL + "    logits = logits.float().contiguous().clone()\n")),
    "forbidden_operation": changed("16.2", (CALL, CALL + "    logits = logits / 1\n")),
    "no_kernel_launched": """# Exercise 16.2 · A draw without a softmax
def sample(logits, temperatures, seeds, positions):
    def mix(word):
        word = word & 0xFFFFFFFF
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return word ^ (word >> 16)

    bits = mix(mix(mix(seeds) ^ positions)[:, None] ^ torch.arange(logits.shape[1], device=logits.device))
    noise = -torch.log(-torch.log(((bits >> 9).float() + 0.5) / 2**23))
    return (logits.double() + temperatures[:, None] * noise).argmax(-1)
""",
    # Two at once.
    "u_reaches_an_end__and_seed_of_row_0": changed(
        "16.2", (SEED, "tl.load(seeds_pointer)"), (U, "bits.to(tl.float32) / 4294967295.0")
    ),
    "position_ignored__and_other_noise": changed("16.2", (WORD, "mix(seed)"), (NOISE, "tl.log(-tl.log(u))")),
}  # fmt: skip
UNUSUAL = {
    "noise times temperature, so that 0 is no case": changed(
        "16.2", (GREEDY, "        if True:\n"), (SCORES, "logits + temperature * noise  #")
    ),
    "blocks in parallel, and a second kernel": SPLIT,
    "four rows a program": ROWS_AT_ONCE,
    "weights divided by exponential noise, in base 2": EXPONENTIAL,
    "from the end to the start": changed(
        "16.2", ("for start in range(0, vocabulary, BLOCK):", "for block in range(tl.cdiv(vocabulary, BLOCK)):\n"
        "        start = (tl.cdiv(vocabulary, BLOCK) - 1 - block) * BLOCK"), (BEST, "        if score >= best:\n"),
    ),
    "in float64": changed("16.2", ("to(tl.float32)", "to(tl.float64)"), ("tl.full([], float(\"-inf\"), tl.float32)",
        "tl.full([], float(\"-inf\"), tl.float64)")),
    "largest logit subtracted, by a reciprocal": changed(
        "16.2", (SCORES, "logits * (1.0 / temperature) + noise  #"), ("min(1024,", "max(16384,")
    ),
}  # fmt: skip
