"""Wrong answers to exercise 18.8, and unusual right ones."""

from tests.submissions.edits import changed

SCALE = "torch.where(largest > 0, largest / 448, 1.0)"
LARGEST = "blocks.abs().amax(dim=-1)"
DIVIDED = "(blocks / scales[:, :, None])"
CAST = "codes.to(torch.float8_e4m3fn)"
SUMS = "tensor_core(x[:, part], weight[:, part], None)"
SCALED = "total += sums * (x_scales[:, block, None] * of_weight)"
OF_WEIGHT = "weight_scales[:, block].repeat_interleave(128)[:outer]"
BLOCKS = "range(0, inner, 128)"


def wrong(*replacements):
    return changed("18.8", *replacements)


WRONG = {
    "scale_inverted": wrong((CAST + ", scales", CAST + ", 1 / scales")),
    "scale_inverted__both": wrong((SCALE, "torch.where(largest > 0, 448 / largest, 1.0)"),
                                  (DIVIDED, "(blocks * scales[:, :, None])")),
    "multiplied": wrong((DIVIDED, "(blocks * scales[:, :, None])")),
    "not_divided": wrong((DIVIDED, "blocks")),
    "scale_of_the_row": wrong((LARGEST, "x.abs().amax(dim=-1, keepdim=True).expand(blocks.shape[:2])")),
    "scale_of_all_rows": wrong((LARGEST, "blocks.abs().amax(dim=(0, 2)).expand(blocks.shape[:2])")),
    "sign_forgotten": wrong((LARGEST, "blocks.amax(dim=-1).abs()")),
    "not_the_largest": wrong((LARGEST, "blocks.abs().mean(dim=-1)")),
    "largest_of_another_format": wrong(("largest / 448", "largest / 240")),
    "largest_of_another_format__e5m2": wrong(("largest / 448", "largest / 57344")),
    "zeros_divided": wrong((SCALE, "largest / 448")),
    "zeros_with_a_floor": wrong((SCALE, "torch.where(largest > 0, largest / 448, 1e-12)")),
    "scale_with_a_floor": wrong((SCALE, "(largest / 448).clamp(min=1e-12)")),
    "scale_with_a_floor__of_the_largest": wrong((SCALE, "largest.clamp(min=1e-4) / 448")),
    "scale_with_a_floor__1_below": wrong((SCALE, "torch.where(largest > 1e-12, largest / 448, 1.0)")),
    "fails_on_a_shorter_block": wrong(("F.pad(x, (0, -inner % 128))", "x")),
    "divided_in_16_bits": wrong((DIVIDED, "(blocks.bfloat16() / scales[:, :, None].bfloat16())")),
    "filled_up_in_front": wrong(("(0, -inner % 128)", "(-inner % 128, 0)"), ("[:, :inner]", "[:, -inner:]")),
    "last_numbers_missing": wrong(
        ("F.pad(x, (0, -inner % 128)).view(", "x[:, : inner // 128 * 128].reshape("), ("-1, 128)", "inner // 128, 128)")
    ),
    "wrong_scales__squared": wrong((SCALED, SCALED + " ** 2")),
    "total_scaled": wrong((SCALED, "total = (total + sums) * (x_scales[:, block, None] * of_weight)")),
    "first_block_missing": wrong((BLOCKS, "range(128, inner, 128)"), ("enumerate(", "enumerate("),
                                 ("x_scales[:, block,", "x_scales[:, block + 1,"), ("[:, block]", "[:, block + 1]")),
    "scales_rounded": wrong((SCALE, f"{SCALE}.bfloat16().float()")),
    "scales_rounded__power_of_two": wrong((SCALE, f"torch.exp2({SCALE}.log2().ceil())")),
    "codes_cut": wrong((CAST, "codes.round().to(torch.float8_e4m3fn)")),
    "blocks_of_another_width": wrong(("-inner % 128)).view(rows, -1, 128)", "-inner % 64)).view(rows, -1, 64)")),
    "another_format": wrong((CAST, "codes.to(torch.float8_e5m2)")),
    # DeepGEMM#50: the promotion to float32 is what is missing.
    "running_total": wrong(
        (SUMS, "tensor_core(x[:, part], weight[:, part], total / (x_scales[:, block, None] * weight_scales[:, block]"
         ".repeat_interleave(128)[:outer]))"),
        (SCALED, SCALED.replace("+=", "=")),
    ),
    "sums_added_again": wrong(
        ("    total = torch.zeros(len(x), outer, device=x.device)\n",
         "    total, sums = torch.zeros(len(x), outer, device=x.device), None\n"),
        (SUMS, SUMS.replace("None", "sums")),
    ),
    "too_exact": wrong((SUMS, "x[:, part].float() @ weight[:, part].float().T")),
    "block_in_parts": wrong(
        (SUMS, "sum(tensor_core(x[:, at : at + 32], weight[:, at : at + 32], None) "
         "for at in range(begin, min(begin + 128, inner), 32))")
    ),
    "requantised": wrong(
        (SUMS, "tensor_core((x[:, part].float() * x_scales[:, block, None]).to(x.dtype), weight[:, part], None)"),
        (SCALED, "total += sums * of_weight"),
    ),
    "not_float8": wrong((SUMS, "tensor_core(x[:, part].float() * x_scales[:, block, None], weight[:, part], None)")),
    "not_float8__all_columns": wrong((SUMS, "tensor_core(x, weight, None)")),
    "x_scales_missing": wrong((SCALED, "total += sums * of_weight")),
    "weight_scales_missing": wrong((SCALED, "total += sums * x_scales[:, block, None]")),
    "scales_missing": wrong((SCALED, "total += sums")),
    "divided_by_scales": wrong((SCALED, SCALED.replace("sums *", "sums /"))),
    "scale_of_another_block": wrong((SCALED, SCALED.replace("block, None", "0, None"))),
    "scale_of_another_block__weight": wrong((OF_WEIGHT, OF_WEIGHT.replace("block", "0"))),
    "rounded_to_16_bits__scales": wrong((SCALED, SCALED.replace("of_weight)", "of_weight).half()"))),
    "running_total__taken_off": wrong((SUMS, SUMS.replace("None", "total") + " - total")),
    "scale_of_the_wrong_rows": wrong((OF_WEIGHT, "weight_scales[torch.arange(outer) % len(weight_scales), block]")),
    "scale_of_the_wrong_rows__first": wrong((OF_WEIGHT, "weight_scales[0, block]")),
    "scale_of_row_0": wrong((SCALED, SCALED.replace("x_scales[:, block, None]", "x_scales[0, block]"))),
    "last_block_missing": wrong((BLOCKS, "range(0, inner // 128 * 128, 128)")),
    "one_block": wrong((SCALED, SCALED.replace("+=", "="))),
    "rounded_to_16_bits": wrong((SCALED, SCALED + "\n        total = total.bfloat16().float()")),
    "not_by_the_tensor_core": wrong(
        ("    outer, inner = weight.shape\n", """    def tensor_core(a, b, sums):
        def cut(numbers, largest):
            unit = torch.exp2(torch.frexp(largest).exponent.double() - 14)
            return (numbers / unit).trunc() * unit

        total = torch.zeros(len(a), len(b), dtype=torch.float64)
        for at in range(0, a.shape[1], 32):
            products = a[:, None, at : at + 32].double() * b[None, :, at : at + 32].double()
            total = total + cut(products, products.abs().amax(-1, keepdim=True)).sum(-1)
            total = cut(total, total)
        return total.float()

    outer, inner = weight.shape
""")
    ),
}  # fmt: skip
UNUSUAL = {
    "block by block": """# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x):
    codes, scales = [], []
    for part in torch.split(x.to(torch.float32), 128, dim=1):
        top = torch.max(part.abs(), dim=1, keepdim=True).values
        scale = top / 448.0
        scale[top == 0] = 1
        codes.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat([c.view(torch.uint8) for c in codes], 1).view(torch.float8_e4m3fn), torch.cat(scales, 1)

def scaled_product(x, x_scales, weight, weight_scales, tensor_core):
    columns = []
    for first in range(0, len(weight), 128):
        rows = weight[first : first + 128]
        parts = []
        for block in range(x_scales.shape[1]):
            at = slice(128 * block, 128 * (block + 1))
            sums = tensor_core(x[:, at].contiguous(), rows[:, at].contiguous(), torch.zeros(len(x), len(rows)))
            parts.append(sums * x_scales[:, block : block + 1] * weight_scales[first // 128, block])
        columns.append(torch.stack(parts).sum(0))
    return torch.cat(columns, dim=1)
""",
    "in halves of a block, and the last block first": """# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x):
    x = x.float()
    number = torch.arange(x.shape[1]) // 128
    top = torch.zeros(len(x), int(number[-1]) + 1)
    top = top.scatter_reduce(1, number.expand(x.shape), x.abs(), "amax")
    scales = torch.where(top == 0, torch.ones(()), top.div(448))
    return x.div(scales[:, number]).to(torch.float8_e4m3fn), scales

def scaled_product(x, x_scales, weight, weight_scales, tensor_core):
    inner = x.shape[1]
    out = torch.zeros(x.shape[0], weight.shape[0])
    row = torch.arange(weight.shape[0]) // 128
    for block in reversed(range((inner + 127) // 128)):
        sums = None
        for begin in range(128 * block, min(128 * block + 128, inner), 64):
            end = min(begin + 64, inner)
            sums = tensor_core(x[:, begin:end], weight[:, begin:end], sums)
        out = out + sums * weight_scales[row, block] * x_scales[:, block].unsqueeze(1)
    return out
""",
    "in float64, row by row": """# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x):
    x = x.double()
    blocks = -(-x.shape[1] // 128)
    scales = torch.ones(len(x), blocks, dtype=torch.float64)
    for row in range(len(x)):
        for block in range(blocks):
            largest = x[row, 128 * block : 128 * block + 128].abs().max()
            if largest > 0:
                scales[row, block] = largest / 448
    each = torch.repeat_interleave(scales, 128, 1)[:, : x.shape[1]]
    return (x / each).to(torch.float8_e4m3fn), scales.float()

def scaled_product(x, x_scales, weight, weight_scales, tensor_core):
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    wide = weight_scales.double().repeat_interleave(128, 0)[: len(weight)]
    for block, (a, b) in enumerate(zip(x.split(128, 1), weight.split(128, 1))):
        total.addcmul_(tensor_core(a, b, None).double(), torch.outer(x_scales[:, block].double(), wide[:, block]))
    return total.float()
""",
    "all blocks filled up with zeros": """# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x):
    numbers = x.float()
    missing = -x.shape[1] % 128
    filled = torch.cat([numbers, torch.zeros(len(x), missing)], dim=1).unflatten(1, (-1, 128))
    scales = filled.abs().max(dim=2).values / 448
    scales = scales.masked_fill(scales == 0, 1)
    codes = filled / scales.unsqueeze(2)
    return codes.to(torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]], scales

def filled_up(codes, rows, columns):
    bytes = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % columns, 0, -len(codes) % rows))
    return bytes.view(torch.float8_e4m3fn)

def scaled_product(x, x_scales, weight, weight_scales, tensor_core):
    x, filled = filled_up(x, 1, 128), filled_up(weight, 128, 128)
    out = torch.zeros(len(x), len(filled))
    for j in range(x_scales.shape[1]):
        block = slice(j * 128, (j + 1) * 128)
        sums = tensor_core(x[:, block], filled[:, block], sums=torch.zeros_like(out))
        sums = sums.unflatten(1, (-1, 128)) * weight_scales[:, j, None] * x_scales[:, j, None, None]
        out += sums.flatten(1)
    return out[:, : len(weight)]
""",
}
