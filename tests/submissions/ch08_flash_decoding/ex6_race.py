"""Wrong answers to exercise 8.6, and unusual right ones."""

from tests.submissions.edits import changed

FAST_LOOP = "for start in range(first, whole, BLOCK_N):"


WRONG = {
    "by_modulo": changed(
        "8.6", ("heads = key_head * GROUP + members  # [BLOCK_G]", "heads = key_head + members * key_heads")
    ),
    "scale_missing": changed("8.6", ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)")),
    "log2e_missing": changed("8.6", ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)")),
    "last_tile_left_out": changed("8.6", ("if whole < last:", "if whole < 0:"), ("slots // (batch * key_heads)", "1")),
    "forbidden_operation": """# Exercise 8.6 · Beat FlashAttention-2 at 128k
@triton.jit
def copy_kernel(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i))

def fast_decode(query, key, value):
    output = F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0].contiguous()
    result = torch.empty_like(output)
    copy_kernel[(output.numel() // 64,)](output, result, N=64)
    return result
""",
    "too_slow": changed("8.6", ("splits = max(1, min(slots", "splits = max(1, min(1, slots")),
    "scale_of_one_size": changed("8.6", ("math.sqrt(head_dim)", "math.sqrt(128)")),
    "group_larger_than_the_tile": changed("8.6", ("max(16, triton.next_power_of_2(group))", "16")),
    "tail_keys_scored": changed("8.6", ('tl.where((keys < last)[None, :], scores, float("-inf"))', "scores")),
    "one_token_too_many": changed("8.6", ("tl.where((keys < last)[None", "tl.where((keys < last + 1)[None")),
}


UNUSUAL = {
    "natural base": changed(
        "8.6",
        ("tl.exp2", "tl.exp"),
        ("tl.log2", "tl.log"),
        ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)"),
    ),
    "two programs on each multiprocessor": changed("8.6", ("slots = ", "slots = 2 * ")),
    "masked throughout": changed(
        "8.6",
        (FAST_LOOP, "for start in range(first, last, BLOCK_N):"),
        ("if whole < last:", "if last < 0:"),
        ("MASKED=False", "MASKED=True"),
    ),
}
