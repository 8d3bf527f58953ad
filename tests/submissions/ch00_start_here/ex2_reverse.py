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
