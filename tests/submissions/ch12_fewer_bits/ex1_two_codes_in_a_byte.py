"""Wrong answers to exercise 12.1, and unusual right ones."""

from tests.submissions.edits import changed

LOW_HIGH = "low, high = codes[..., 0::2] & 15, codes[..., 1::2] & 15"
BYTE = "(low | (high << 4))"
NIBBLES = "nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)"
CODES = "(nibbles ^ 8).to(torch.int8) - 8"

WRONG = {
    "nibbles_exchanged": changed("12.1", ("low | (high << 4)", "high | (low << 4)")),
    "nibbles_exchanged__when_read": changed("12.1", ("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)")),
    "halves_packed": changed("12.1", (LOW_HIGH, "low, high = (codes & 15).chunk(2, dim=-1)")),
    "low_not_masked": changed("12.1", ("codes[..., 0::2] & 15", "codes[..., 0::2]")),
    "low_not_masked__added": changed("12.1", ("codes[..., 0::2] & 15", "codes[..., 0::2]"), ("low | (", "low + (")),
    "stored_with_an_offset": changed(
        "12.1",
        (LOW_HIGH, "low, high = codes[..., 0::2] + 8, codes[..., 1::2] + 8"),
        (CODES, "nibbles.to(torch.int8) - 8"),
    ),
    "sign_lost": changed("12.1", ("& 15, codes", "& 7, codes"), ("1::2] & 15", "1::2] & 7")),
    "sign_lost__negative_as_0": changed(
        "12.1", (LOW_HIGH, "low, high = codes[..., 0::2].clamp(0), codes[..., 1::2].clamp(0)")
    ),
    "shifted_wrongly": changed("12.1", ("high << 4", "high << 3")),
    "one_code_alone": changed("12.1", (BYTE, "low")),
    "packed_along_the_first": changed(
        "12.1", ("codes[..., 0::2] & 15, codes[..., 1::2] & 15", "codes[0::2] & 15, codes[1::2] & 15")
    ),
    "not_interleaved": changed("12.1", (NIBBLES, "nibbles = torch.cat((packed & 15, packed >> 4), dim=-1)")),
    "not_interleaved__stacked_before": changed("12.1", ("dim=-1).flatten(-2)", "dim=-2).flatten(-2)")),
    "sign_not_extended": changed("12.1", (CODES, "nibbles.to(torch.int8)")),
    # A shift left and an arithmetic one right are the C idiom; on uint8 the second fills with zeros.
    "sign_not_extended__shifts_of_uint8": changed(
        "12.1", ("packed & 15, packed >> 4", "(packed << 4) >> 4, packed >> 4"), (CODES, "nibbles.to(torch.int8)")
    ),
    "low_sign_not_extended": changed(
        "12.1",
        ("(packed & 15, packed >> 4)", "(packed.view(torch.int8) & 15, packed.view(torch.int8) >> 4)"),
        (CODES, "nibbles"),
    ),
    "high_sign_not_extended": changed(
        "12.1",
        ("(packed & 15, packed >> 4)", "((packed << 4).view(torch.int8) >> 4, (packed >> 4).view(torch.int8))"),
        (CODES, "nibbles"),
    ),
    "eight_is_positive": changed("12.1", (CODES, "nibbles.to(torch.int8) - 16 * (nibbles > 8).to(torch.int8)")),
    "ones_complement": changed("12.1", (CODES, "nibbles.to(torch.int8) - 15 * (nibbles >= 8).to(torch.int8)")),
    "nibbles_exchanged__and_sign_not_extended": changed(
        "12.1", ("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)"), (CODES, "nibbles.to(torch.int8)")
    ),
    # The first case with a dimension of stride 0 raises an error.
    "argument_written": changed(
        "12.1",
        (
            "low, high = codes[..., 0::2] & 15, codes[..., 1::2] & 15",
            "codes &= 15\n    low, high = codes[..., 0::2], codes[..., 1::2]",
        ),
    ),
    "argument_written__unpacking": changed(
        "12.1",
        ("nibbles = torch.stack((packed & 15, packed >> 4)",
         "high = packed >> 4\n    packed &= 15\n    nibbles = torch.stack((packed, high)")
    ),
}

UNUSUAL = {
    "arithmetic instead of bits": """# Exercise 12.1 · Two codes in a byte
def pack_int4(codes):
    pairs = codes.to(torch.int32).remainder(16).unflatten(-1, (-1, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)

def unpack_int4(packed):
    numbers = packed.to(torch.int32)
    both = torch.stack((numbers % 16, numbers // 16), -1).reshape(*packed.shape[:-1], -1)
    return torch.where(both < 8, both, both - 16).to(torch.int8)
""",
    "a table of 16 codes": """# Exercise 12.1 · Two codes in a byte
def pack_int4(codes):
    out = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 2, dtype=torch.uint8, device=codes.device)
    for half in range(2):
        out |= (codes[..., half::2].to(torch.uint8) & 15) << (4 * half)
    return out

def unpack_int4(packed):
    table = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.int8, device=packed.device)
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.int8, device=packed.device)
    out[..., 0::2], out[..., 1::2] = table[(packed & 15).long()], table[(packed >> 4).long()]
    return out
""",
    "arithmetic shifts of int8": """# Exercise 12.1 · Two codes in a byte
def pack_int4(codes):
    return ((codes[..., 1::2] << 4) | (codes[..., 0::2] & 0x0F)).view(torch.uint8)

def unpack_int4(packed):
    signed = packed.contiguous().view(torch.int8)
    return torch.stack([(signed << 4) >> 4, signed >> 4], dim=-1).flatten(start_dim=-2)
""",
}
