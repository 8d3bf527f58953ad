"""Wrong answers to exercise 0.2, and unusual right ones."""

from tests.submissions.edits import changed


def reverse(load="x_pointer + length - 1 - offsets", store="result_pointer + offsets", mask="offsets < length",
            offsets="tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", programs="triton.cdiv(x.numel(), 256)"):
    """A whole cell for 0.2 with one part replaced."""
    return f"""# Exercise 0.2 · Reverse a vector
@triton.jit
def reverse_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    offsets = {offsets}
    inside = {mask}
    tl.store({store}, tl.load({load}, mask=inside), mask=inside)

def reverse(x):
    result = torch.empty_like(x)
    reverse_kernel[({programs},)](x, result, x.numel(), BLOCK=256)
    return result
"""


def reverse_with(body):
    """A whole cell for 0.2 with this body of the kernel and the right launcher."""
    head, rest = reverse().split("    offsets = ", 1)
    return f"{head}    {body}\n\ndef reverse(x):{rest.split('def reverse(x):', 1)[1]}"


WRONG = {
        "written_into_x": changed("0.2", ("result = torch.empty_like(x)", "result = x")),
        "nothing_stored": reverse_with("pass"),
        "nothing_stored__2": reverse_with("""offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x_pointer + length - 1 - offsets, mask=offsets < length)"""),
        "not_reversed": reverse(load="x_pointer + offsets"),
        "not_reversed__2": reverse(store="result_pointer + length - 1 - offsets"),
        "reversed_within_blocks": reverse(
            load="x_pointer + tl.minimum(tl.program_id(0) * BLOCK + BLOCK, length) - 1 - tl.arange(0, BLOCK)"),
        "shifted_by_one": reverse(load="x_pointer + length - offsets"),
        "shifted_by_one__early": reverse(load="x_pointer + length - 2 - offsets"),
        "shifted_by_one__backwards": reverse(load="x_pointer + offsets", store="result_pointer + length - offsets"),
        "reversed_within_blocks__stored": reverse(
            load="x_pointer + offsets",
            store="result_pointer + tl.minimum(tl.program_id(0) * BLOCK + BLOCK, length) - 1 - tl.arange(0, BLOCK)"),
        "reversed_within_blocks__unmasked": reverse(
            load="x_pointer + tl.program_id(0) * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)"),
        "blocks_in_reverse": reverse(load="x_pointer + length - BLOCK * (tl.program_id(0) + 1) + tl.arange(0, BLOCK)"),
        "counted_from_the_last_block": reverse(load="x_pointer + tl.num_programs(0) * BLOCK - 1 - offsets"),
        "length_forgotten": reverse(load="x_pointer - offsets"),
        "first_element_everywhere": reverse(load="x_pointer + offsets * 0"),
        "last_element_everywhere": reverse(load="x_pointer + length - 1 + offsets * 0"),
        "not_reversed__and_grid_of_other_blocks": reverse(
            load="x_pointer + offsets", programs="triton.cdiv(x.numel(), 1024)"),
        "shifted_by_one__and_at_least_one_program": reverse(
            load="x_pointer + length - offsets", programs="max(1, x.numel() // 256)"),
        "only_first_block__of_16": reverse(programs="min(16, triton.cdiv(x.numel(), 256))"),
        "last_element_missing": reverse(mask="offsets < length - 1"),
        "at_least_one_program": reverse(programs="max(1, x.numel() // 256)"),
        "too_few_programs__backwards": reverse(
            load="x_pointer + offsets", store="result_pointer + length - 1 - offsets", programs="x.numel() // 256"),
        "blocks_overlap": reverse(offsets="tl.program_id(0) + tl.arange(0, BLOCK)"),
        "last_block_missing": reverse(programs="max(1, triton.cdiv(x.numel(), 256) - 1)"),
        "only_first_block": reverse(offsets="tl.arange(0, BLOCK)"),
        "only_first_block__2": reverse(programs="1"),
        "too_few_programs": reverse(programs="x.numel() // 256"),
        "past_the_end": reverse(mask="offsets > -1"),
        "undefined_name": reverse(load="x_pointer + number - 1 - offsets"),
        "forbidden_operation": '''# Exercise 0.2 · Reverse a vector
@triton.jit
def copy_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    tl.store(result_pointer + offsets, tl.load(x_pointer + offsets, mask=inside), mask=inside)

def reverse(x):
    result = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 256),)](x.flip(0), result, x.numel(), BLOCK=256)
    return result
''',
    }


UNUSUAL = {
        "reads in order and writes backwards": reverse(
            load="x_pointer + offsets", store="result_pointer + length - 1 - offsets"),
        "one element a program": '''# Exercise 0.2 · Reverse a vector
@triton.jit
def reverse_kernel(x_pointer, result_pointer, length):
    position = tl.program_id(0)
    tl.store(result_pointer + position, tl.load(x_pointer + (length - 1 - position)))

def reverse(x):
    result = torch.empty_like(x)
    reverse_kernel[(x.numel(),)](x, result, x.numel())
    return result
''',
        "a pointer to the last element, counted down": reverse(load="(x_pointer + length - 1) + (-offsets)"),
        "both ends exchanged by one program": '''# Exercise 0.2 · Reverse a vector
@triton.jit
def reverse_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    half = (length + 1) // 2
    for start in range(0, half, BLOCK):
        low = start + tl.arange(0, BLOCK)
        first = tl.load(x_pointer + low, mask=low < half)
        last = tl.load(x_pointer + length - 1 - low, mask=low < half)
        tl.store(result_pointer + low, last, mask=low < half)
        tl.store(result_pointer + length - 1 - low, first, mask=low < half)

def reverse(x):
    result = torch.empty(x.shape, device=x.device)
    reverse_kernel[(1,)](x, result, x.numel(), BLOCK=64)
    return result
''',
        "the whole vector as one block": '''# Exercise 0.2 · Reverse a vector
@triton.jit
def reverse_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x_pointer + offsets, mask=offsets < length)
    tl.store(result_pointer + length - 1 - offsets, values, mask=offsets < length)

def reverse(x):
    result = torch.empty_like(x)
    chunk = 1 << 15
    if x.numel() <= chunk:
        reverse_kernel[(1,)](x, result, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
        return result
    for start in range(0, x.numel(), chunk):
        piece = x[start : start + chunk]
        stop = x.numel() - start
        reverse_kernel[(1,)](piece, result[stop - piece.numel() : stop], piece.numel(), BLOCK=chunk)
    return result
''',
    }


WRONG |= {
    "mask_by_the_block": changed("0.2", ("inside = offsets < length", "inside = offsets < BLOCK")),
    "stored_in_block_0": changed(
        "0.2", ("tl.store(result_pointer + offsets", "tl.store(result_pointer + tl.arange(0, BLOCK)")
    ),
    # With another slip, of which two in the same words explain the rest: this one is told.
    "reversed_within_blocks__and_rounded_down": changed(
        "0.2",
        ("length - 1 - offsets", "(tl.program_id(0) + 1) * BLOCK - 1 - tl.arange(0, BLOCK)"),
        ("triton.cdiv(x.numel(), 256)", "x.numel() // 256"),
    ),
}
