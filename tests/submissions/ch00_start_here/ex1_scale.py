"""Wrong answers to exercise 0.1, and unusual right ones."""

from tests.submissions.edits import changed

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


WRONG = {
        "factor_truncated": changed(
            "0.1", ("[(programs,)](x, result, factor,", "[(programs,)](x, result, int(factor),")
        ),
        "too_few_programs": scale(programs="x.numel() // BLOCK"),
        "at_least_one_program": scale(programs="max(1, x.numel() // BLOCK)"),
        "rounded_to_nearest": scale(programs="round(x.numel() / BLOCK)"),
        "rounded_to_nearest__2": scale(programs="max(1, round(x.numel() / BLOCK))"),
        "only_first_block": scale(programs="1"),
        "only_first_block__2": scale(SCALE_KERNEL.replace("tl.program_id(0) * BLOCK + ", "")),
        "blocks_overlap": scale(SCALE_KERNEL.replace("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "last_element_missing": scale(SCALE_KERNEL.replace("offsets < length", "offsets < length - 1")),
        "not_scaled": scale(SCALE_KERNEL.replace("values * factor", "values")),
        "factor_added": scale(SCALE_KERNEL.replace("values * factor", "values + factor")),
        "past_the_end": scale(SCALE_KERNEL.replace(", mask=inside", "")),
        "only_first_block__3": scale(programs="min(16, triton.cdiv(x.numel(), BLOCK))"),
        "last_block_missing": scale(programs="max(1, triton.cdiv(x.numel(), BLOCK) - 1)"),
        "last_block_missing__2": scale(programs="triton.cdiv(x.numel(), BLOCK) - 1"),
        "first_block_missing": scale(SCALE_KERNEL.replace("tl.program_id(0)", "(tl.program_id(0) + 1)")),
        "first_element_missing": scale(SCALE_KERNEL.replace("offsets < length", "(offsets > 0) & (offsets < length)")),
        "grid_of_other_blocks": scale(programs="triton.cdiv(x.numel(), 1024)"),
        "gaps_between_blocks": scale(SCALE_KERNEL.replace("tl.program_id(0) * BLOCK", "tl.program_id(0) * 1024")),
        "reads_block_0": scale(
            SCALE_KERNEL.replace("load(x_pointer + offsets", "load(x_pointer + tl.arange(0, BLOCK)")),
        "divided": scale(SCALE_KERNEL.replace("values * factor", "values / factor")),
        "factor_without_sign": scale(SCALE_KERNEL.replace("values * factor", "values * tl.abs(factor * 1.0)")),
        "factor_twice": changed(
            "0.1", ("[(programs,)](x, result, factor,", "[(programs,)](x, result, factor * factor,")),
        "squared": scale(SCALE_KERNEL.replace("values * factor", "values * values")),
        "factor_added__and_at_least_one_program": scale(
            SCALE_KERNEL.replace("values * factor", "values + factor"), programs="max(1, x.numel() // BLOCK)"),
        "not_scaled__and_only_first_block": scale(SCALE_KERNEL.replace("values * factor", "values"), programs="1"),
        "too_few_programs__of_64": scale(programs="x.numel() // BLOCK").replace("BLOCK = 256", "BLOCK = 64"),
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
    }


UNUSUAL = {
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
        "three programs that walk in strides": """# Exercise 0.1 · Scale a vector of any length
@triton.jit
def scale_kernel(x_pointer, result_pointer, factor, length, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    while start < length:
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(x_pointer + offsets, mask=offsets < length)
        tl.store(result_pointer + offsets, factor * values, mask=offsets < length)
        start += BLOCK * tl.num_programs(0)

def scale(x, factor):
    result = x.new_empty(len(x))
    scale_kernel[(3,)](x, result, factor, len(x), BLOCK=64)
    return result
""",
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
    }


WRONG |= {
    "only_first_block__four_programs": changed(
        "0.1", ("programs = triton.cdiv(x.numel(), BLOCK)", "programs = 4")
    ),
}
