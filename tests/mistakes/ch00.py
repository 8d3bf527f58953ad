"""Wrong answers to the exercises of chapter 00, and unusual right ones.

WRONG: exercise id -> {mistake that the verdict must name: the cell}. A name that ends in "__2" is another way of making
the same mistake. UNUSUAL: exercise id -> {what is unusual: the cell}; these must pass.
"""

SCALE_KERNEL = '''
BLOCK = 256

@triton.jit
def scale_kernel(x_pointer, result_pointer, factor, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    values = tl.load(x_pointer + offsets, mask=inside)
    tl.store(result_pointer + offsets, values * factor, mask=inside)
'''


def scale(kernel=SCALE_KERNEL, programs="triton.cdiv(x.numel(), BLOCK)", result="torch.empty_like(x)"):
    """A whole cell for 0.1 with one part replaced."""
    return f"""# Exercise 0.1 · Scale a vector of any length
{kernel}
def scale(x, factor):
    programs = {programs}
    result = {result}
    scale_kernel[(programs,)](x, result, factor, x.numel(), BLOCK=BLOCK)
    return result
"""


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
    "0.1": {
        "too_few_programs": scale(programs="x.numel() // BLOCK"),
        "at_least_one_program": scale(programs="max(1, x.numel() // BLOCK)"),
        "rounded_to_nearest": scale(programs="round(x.numel() / BLOCK)"),
        "only_first_block": scale(programs="1"),
        "only_first_block__2": scale(SCALE_KERNEL.replace("tl.program_id(0) * BLOCK + ", "")),
        "blocks_overlap": scale(SCALE_KERNEL.replace("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "last_element_missing": scale(SCALE_KERNEL.replace("offsets < length", "offsets < length - 1")),
        "not_scaled": scale(SCALE_KERNEL.replace("values * factor", "values")),
        "factor_added": scale(SCALE_KERNEL.replace("values * factor", "values + factor")),
        "past_the_end": scale(SCALE_KERNEL.replace(", mask=inside", "")),
        "modified_input": scale(SCALE_KERNEL.replace(
            "    tl.store(", "    tl.store(x_pointer + offsets, values * factor, mask=inside)\n    tl.store(")),
        "no_kernel_launched": '''# Exercise 0.1 · Scale a vector of any length
def scale(x, factor):
    return torch.from_numpy(x.cpu().numpy() * np.float32(factor)).to(x.device)
''',
        "forbidden_operation": scale().replace("return result", "return x * factor"),
        "undefined_name": scale(programs="number_of_programs"),
        "unfinished": scale().replace("programs = triton", "if x.numel() == 1:\n        raise NotImplementedError("
                                      '"Exercise 0.1")\n    programs = triton'),
    },
    "0.2": {
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
    },
}

UNUSUAL = {
    "0.1": {
        "one program more than needed": scale(programs="x.numel() // BLOCK + 1"),
        "another block length": scale().replace("BLOCK = 256", "BLOCK = 64"),
        "one program that walks over all blocks": '''# Exercise 0.1 · Scale a vector of any length
@triton.jit
def scale_kernel(x_pointer, result_pointer, factor, length, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        tl.store(result_pointer + offsets, tl.load(x_pointer + offsets, mask=inside) * factor, mask=inside)

def scale(x, factor):
    result = torch.empty_like(x)
    scale_kernel[(1,)](x, result, factor, x.numel(), BLOCK=256)
    return result
''',
        "an unmasked kernel on padded copies": '''# Exercise 0.1 · Scale a vector of any length
@triton.jit
def scale_kernel(x_pointer, result_pointer, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result_pointer + offsets, tl.load(x_pointer + offsets) * factor)

def scale(x, factor):
    programs = -(-x.numel() // 256)
    padded = torch.zeros(programs * 256, device=x.device)
    padded[: x.numel()] = x
    result = torch.empty_like(padded)
    scale_kernel[(programs,)](padded, result, factor, BLOCK=256)
    return result[: x.numel()]
''',
    },
    "0.2": {
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
    },
}
