"""Wrong answers to exercise 19.7, and unusual right ones."""

from tests.submissions.edits import changed

CODES = "(sizes > smaller_is_even).sum(-1) + (sizes >= larger_is_even).sum(-1)"
BYTES = "codes[:, 0::2] | codes[:, 1::2] << 4"
SIGN = "codes += 8 * (numbers < 0)"
LARGEST = "blocks.abs().amax(dim=-1)"
EXPONENT = f"torch.log2({LARGEST}.double() / 6).ceil()"
ROW = "torch.where(largest > 0, largest / (448 * 6), 1.0)"
SCALE = f"({LARGEST} / 6 / row_scales[:, None]).clamp(min=2**-6).to(torch.float8_e4m3fn)"
BOTH = "(scales.float() * row_scales[:, None])"


def wrong(*replacements):
    return changed("19.7", *replacements)


WRONG = {
    "halves_exchanged": wrong((BYTES, "codes[:, 0::2] << 4 | codes[:, 1::2]")),
    "not_neighbours": wrong((BYTES, "codes[:, : codes.shape[1] // 2] | codes[:, codes.shape[1] // 2 :] << 4")),
    "sign_lost": wrong((SIGN, "pass")),
    "sign_lost__inverted": wrong((SIGN, "codes += 8 * (numbers > 0)")),
    "twos_complement": wrong((SIGN, "codes = torch.where(numbers < 0, (16 - codes) % 16, codes)")),
    "halfway_up": wrong((CODES, CODES.replace("> s", ">= s"))),
    "halfway_down": wrong((CODES, CODES.replace(">= l", "> l"))),
    "halfway_down__nearest_of_a_list": wrong((CODES, "(sizes - torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).abs()"
                                              ".argmin(-1)")),
    "cut_down": wrong((CODES, "(sizes >= torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])).sum(-1)")),
    # gHashTag/trinity#694, ROCm/aiter#3212: the rule of the OCP's text.
    "powers_alone": wrong((EXPONENT, f"(torch.log2({LARGEST}).floor() - 2)")),
    "powers_alone__frexp": wrong((EXPONENT, f"(torch.frexp({LARGEST}).exponent.float() - 3)")),
    # ml-explore/mlx#4353
    "rounded_down__nearest": wrong((EXPONENT, f"torch.log2({LARGEST} / 6).round()")),
    "rounded_down": wrong((EXPONENT, f"torch.log2({LARGEST} / 6).floor()")),
    # vllm-project/vllm#43557
    "wrong_threshold": wrong((EXPONENT, f"(torch.log2({LARGEST} / 1.75).floor() - 1)")),
    # microsoft/onnxruntime#32122: frexp of an exact power of two.
    "too_large": wrong((EXPONENT, f"torch.frexp({LARGEST} / 6).exponent.float()")),
    "too_large__of_a_power": wrong((EXPONENT, f"(torch.log2({LARGEST}).ceil() - 2)")),
    "wrong_offset": wrong(("exponents + 127", "exponents + 128")),
    "wrong_offset__none": wrong(("(exponents + 127).to(torch.uint8)", "exponents.to(torch.int32).to(torch.uint8)")),
    "floor_of_the_exponent": wrong((f"{EXPONENT}.clamp(min=-127)",
                                    f"torch.log2({LARGEST}.clamp(min=1e-12) / 6).ceil()")),
    "logarithm_rounded": wrong((f"{LARGEST}.double()", LARGEST)),
    "halves_exchanged__and_halfway_down": wrong((BYTES, "codes[:, 0::2] << 4 | codes[:, 1::2]"),
                                                (CODES, CODES.replace(">= l", "> l"))),
    "floor_of_the_exponent__zeros": wrong((f"    exponents = {EXPONENT}.clamp(min=-127).float()\n",
        f"    exponents = {EXPONENT}\n    exponents = exponents.masked_fill(exponents.isinf(), 0)\n")),
    "wrong_width": wrong(("(-1, 32)", "(-1, 16)")),
    "wrong_width__nv": wrong(("(-1, 16)", "(-1, 32)")),
    "sign_forgotten": wrong((EXPONENT, EXPONENT.replace(".abs()", ""))),
    "sign_forgotten__nv": wrong((SCALE, SCALE.replace(".abs()", ""))),
    "scale_of_the_tensor": wrong(("x.abs().amax(dim=-1)", "x.abs().amax().expand(len(x))")),
    # kekzl/imp#846: without the row's scale those of the blocks collapse.
    "row_scale_left_out": wrong((ROW, "torch.ones_like(largest)")),
    "wrong_row_scale": wrong((ROW, "torch.where(largest > 0, largest / 448, 1.0)")),
    "row_of_zeros": wrong((ROW, "largest / (448 * 6)")),
    "floor_of_the_rows": wrong((ROW, "(largest / (448 * 6)).clamp(min=1e-12)")),
    "one_scale_alone": wrong((BOTH, "scales.float()")),
    "one_scale_alone__row": wrong((BOTH, "(row_scales[:, None] + 0 * scales.float())")),
    "scale_before_rounding": wrong((BOTH, f"({SCALE.removesuffix('.to(torch.float8_e4m3fn)')} * row_scales[:, None])")),
    "no_smallest_scale": wrong((".clamp(min=2**-6)", "")),
    "block_of_zeros": wrong((".clamp(min=2**-6)", f".where({LARGEST} > 0, torch.tensor(1.0)).clamp(min=2**-6)")),
    "block_scale_alone": wrong((f"{LARGEST} / 6 / row_scales[:, None]", f"{LARGEST} / 6")),
    "block_scale_alone__numbers": wrong((f"{LARGEST} / 6 / row_scales[:, None]", f"{LARGEST} / 6"),
                                        (BOTH, "scales.float()")),
    "scale_before_rounding__mx": wrong(("torch.exp2(exponents)[", f"({LARGEST} / 6)[")),
    "not_cut_at_6": wrong((CODES, f"{CODES} + ((sizes[..., 0] / 2).round() - 3).clamp(min=0).long()")),
    "floor_of_the_exponent__tiny": wrong((f"{EXPONENT}.clamp(min=-127)",
                                          f"torch.log2({LARGEST}.clamp(min=torch.finfo(x.dtype).tiny) / 6).ceil()")),
}  # fmt: skip
UNUSUAL = {
    "a table of all sixteen numbers": """# Exercise 19.7 · Four bits with scales
def to_codes(numbers):
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first: argmin takes the first of equal distances
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = order[(numbers.abs().unsqueeze(-1) - sizes[order]).abs().argmin(dim=-1)]
    code = torch.where(torch.signbit(numbers), code + 8, code).reshape(len(numbers), -1, 2)
    return (code[..., 0] + 16 * code[..., 1]).to(torch.uint8)


def to_mxfp4(x):
    rows, columns = x.shape
    parts, bytes = [], []
    for block in x.split(32, dim=1):
        largest = block.abs().max(dim=1).values
        mantissa, exponent = torch.frexp(largest)
        exponent = exponent - 3 + (mantissa > 0.75).int()
        exponent = torch.where(largest == 0, -127, exponent)
        parts.append(torch.ldexp(block, -exponent[:, None]))
        bytes.append(exponent + 127)
    return to_codes(torch.cat(parts, 1)), torch.stack(bytes, 1).to(torch.uint8)


def to_nvfp4(x):
    rows = x.abs().max(dim=1).values / 448 / 6
    rows[rows == 0] = 1
    scaled = (x / rows[:, None]).view(len(x), -1, 16)
    scales = (scaled.abs().amax(-1) / 6).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    return to_codes((scaled / scales.float()[..., None]).view(x.shape)), scales, rows
""",
    "rounded in three ranges, and the exponent from the bits": """# Exercise 19.7 · Four bits with scales
def to_codes(numbers):
    size = numbers.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = (size / step).round() * step
    code = torch.where(size <= 2, size * 2, torch.where(size <= 4, size + 2, torch.tensor(7.0))).to(torch.uint8)
    code = code | (numbers < 0).to(torch.uint8) * 8
    low, high = code.unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def to_mxfp4(x):
    largest = x.reshape(len(x), -1, 32).abs().amax(2)
    byte = ((largest.view(torch.int32) + 0x3FFFFF) >> 23) - 2
    byte = byte.clamp(min=0)
    scale = torch.pow(2.0, byte - 127).repeat_interleave(32, 1)
    return to_codes(x / scale), byte.to(torch.uint8)


def to_nvfp4(x):
    top = x.abs().amax(1)
    row_scales = torch.where(top == 0, torch.ones_like(top), top / 2688)
    largest = torch.stack([block.abs().amax(1) for block in x.split(16, 1)], 1)
    scales = torch.maximum(largest / row_scales.unsqueeze(1) / 6, torch.tensor(2.0**-6)).to(torch.float8_e4m3fn)
    each = torch.repeat_interleave(scales.to(torch.float32), 16, 1)
    return to_codes(x / each / row_scales[:, None]), scales, row_scales
""",
    "in float64, block by block": """# Exercise 19.7 · Four bits with scales
def to_codes(numbers):
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    flat = numbers.abs().contiguous()
    below, above = torch.bucketize(flat, edges, right=False), torch.bucketize(flat, edges, right=True)
    code = torch.where(below % 2 == 0, below, above)
    code = code + (numbers < 0).int() * 8
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // 2, dtype=torch.uint8)
    packed += code[:, ::2].to(torch.uint8)
    packed += (code[:, 1::2] * 16).to(torch.uint8)
    return packed


def to_mxfp4(x):
    blocks = x.double().reshape(-1, 32)
    e = torch.tensor([math.ceil(math.log2(top / 6)) if top else -127 for top in blocks.abs().amax(1).tolist()])
    numbers = blocks * 2.0 ** -e.double()[:, None]
    return to_codes(numbers.float().reshape(x.shape)), (e + 127).to(torch.uint8).reshape(len(x), -1)


def to_nvfp4(x):
    codes, scales, rows = [], [], []
    for row in x.double():
        top = row.abs().max().item()
        outer = top / 2688 if top else 1.0
        inner = (row.view(-1, 16).abs().amax(1) / 6 / outer).clamp(min=1 / 64).float().to(torch.float8_e4m3fn)
        codes.append((row.view(-1, 16) / outer / inner.double()[:, None]).float().view(-1))
        scales.append(inner.view(torch.uint8))
        rows.append(outer)
    return to_codes(torch.stack(codes)), torch.stack(scales).view(torch.float8_e4m3fn), torch.tensor(rows)
""",
}
