"""Wrong answers to exercise 12.7, and unusual right ones."""

from course_lib.checker.specification.catalog import solution_source
from tests.submissions.edits import changed

ROOT = "/ math.sqrt(vectors.shape[-1])"


LARGEST = "largest = block.abs().max()"


SCALE = "scale = largest / 448 if largest > 0 else torch.ones_like(largest)"


CODES = "(block / scale).to(torch.float8_e4m3fn).float()"


WRONG = {
    "not_rounded__to_another_format": changed("12.7", ("torch.float8_e4m3fn", "torch.float8_e5m2")),
    "minus_in_another_corner": changed("12.7", ("[matrix, -matrix]", "[-matrix, matrix]")),
    "not_normalised": changed("12.7", (ROOT, "")),
    "divided_by_the_size": changed("12.7", (ROOT, "/ vectors.shape[-1]")),
    "sign_changes_order": changed(
        "12.7",
        (
            "return vectors",
            "matrix = matrix[(matrix[:, 1:] != matrix[:, :-1]).sum(1).argsort()].T\n    return vectors",
        ),
    ),
    "only_one_doubling": """# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    if vectors.shape[-1] == 1:
        return vectors
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first + second, first - second], dim=-1) / math.sqrt(2)

""" + "def quantise" + solution_source("12.7").split("def quantise")[1],
    "only_one_doubling__neighbours": """# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    if vectors.shape[-1] == 1:
        return vectors
    first, second = vectors[..., 0::2], vectors[..., 1::2]
    return torch.stack([first + second, first - second], dim=-1).flatten(-2) / math.sqrt(2)

""" + "def quantise" + solution_source("12.7").split("def quantise")[1],
    "overwritten_too_early": """# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    result, size, width = vectors.clone(), vectors.shape[-1], 1
    while width < size:
        pairs = result.view(-1, size // (2 * width), 2, width)
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = pairs[:, :, 0] - pairs[:, :, 1]
        width *= 2
    return result / math.sqrt(size)

""" + "def quantise" + solution_source("12.7").split("def quantise")[1],
    "last_block_left_out": changed(
        "12.7", ("range(0, tensor.shape[0], rows)", "range(0, tensor.shape[0] - rows + 1, rows)")
    ),
    "last_block_left_out__zeros": changed(
        "12.7",
        ("range(0, tensor.shape[0], rows)", "range(0, tensor.shape[0] // rows * rows, rows)"),
        ("empty_like", "zeros_like"),
    ),
    "one_scale_for_all": changed("12.7", (LARGEST, "largest = tensor.abs().max()")),
    "sign_forgotten": changed("12.7", (LARGEST, "largest = block.max()")),
    "largest_of_another_format": changed("12.7", ("largest / 448", "largest / 240")),
    "largest_of_another_format__int8": changed("12.7", ("largest / 448", "largest / 127")),
    "largest_of_another_format__e5m2": changed("12.7", ("largest / 448", "largest / 57344")),
    "mean_for_largest": changed("12.7", (LARGEST, "largest = block.abs().mean()")),
    "scale_upside_down": changed("12.7", ("scales.append(scale)", "scales.append(1 / scale)")),
    "zeros_divided_by_zero": changed("12.7", (SCALE, "scale = largest / 448")),
    "minus_forgotten": changed("12.7", ("[matrix, -matrix]", "[matrix, matrix]")),
    "bits_reversed_order": """# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    rest = vectors
    for _ in range(vectors.shape[-1].bit_length() - 1):
        first, second = rest.chunk(2, dim=-1)
        rest = torch.stack([first + second, first - second], dim=-1).flatten(-2)
    order = torch.zeros(1, dtype=torch.int64)
    while len(order) < vectors.shape[-1]:
        order = torch.cat((2 * order, 2 * order + 1))
    return rest[..., order] / math.sqrt(vectors.shape[-1])

""" + "def quantise" + solution_source("12.7").split("def quantise")[1],
    "modified_input": changed("12.7", (CODES, CODES.replace("(block / scale)", "block.div_(scale)"))),
    "modified_input__of_the_rotation": """# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    size, width = vectors.shape[-1], 1
    while width < size:
        first, second = vectors.reshape(-1, size // (2 * width), 2, width).unbind(2)
        total, difference = first + second, first - second
        first.copy_(total)
        second.copy_(difference)
        width *= 2
    return vectors / math.sqrt(size)

""" + "def quantise" + solution_source("12.7").split("def quantise")[1],
    "power_of_two_scales": changed(
        "12.7", (SCALE, SCALE.replace("largest / 448 if", "torch.exp2((largest / 448).log2().ceil()) if"))
    ),
    "small_taken_for_zero": changed("12.7", (SCALE, SCALE.replace("largest > 0", "largest > 1e-6"))),
    "scale_with_a_floor": changed("12.7", (SCALE, "scale = (largest / 448).clamp(min=1e-12)")),
    "codes_restored": changed("12.7", (CODES, f"{CODES} * scale")),
    "not_rounded": changed("12.7", (CODES, "block / scale")),
    "not_rounded__to_integers": changed("12.7", (CODES, "(block / scale).round()")),
}


FAST_TRANSFORM = """# Exercise 12.7 · Eight bits, and where outliers go
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


WRONG["codes_left_in_eight_bits"] = FAST_TRANSFORM.replace("return codes.float()", "return codes")


SIGNS_BY_BITS = """# Exercise 12.7 · Eight bits, and where outliers go
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


UNUSUAL = {
        "the fast transform, and blocks at once": FAST_TRANSFORM,
        "signs by common bits": SIGNS_BY_BITS,
        "float64 within": changed("12.7", (CODES, "(block.double() / scale).to(torch.float8_e4m3fn).float()")),
    }


WRONG |= {
    "zeros_divided_too_early": changed("12.7", ("(block / scale)", "(block / (largest / 448))")),
    "scale_with_a_floor__added": changed("12.7", (SCALE, "scale = largest / 448 + 1e-20")),
}
