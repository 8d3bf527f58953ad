"""Wrong answers to exercise 15.4, and unusual right ones."""

from tests.submissions.edits import changed

BF16 = 'if dtype == "bfloat16" and capability < 80:'
FP8 = 'capability < 89 or use == "training"'
SPLIT = 'use == "decode" and programs < 100 and context >= 1024'
PAGES = '("FlashInfer", "pages") if head_dim in (64, 128, 256) else ("course", "head_dim")'
TENSOR = '    if mask == "tensor":\n        return "SDPA", "mask"\n'
LAST = '{90: "FlashAttention 3", 100: "FlashAttention 4"}.get(capability, "FlashAttention 2")'

WRONG = {
    "bfloat16_on_turing": changed("15.4", (BF16, "if False:")),
    "float8_before_ada": changed("15.4", (FP8, 'use == "training"')),
    "float8_in_training": changed("15.4", (FP8, "capability < 89")),
    "pages_late": changed("15.4", ("if page_size > 0:", 'if page_size > 0 and use != "decode":'),
                          ('page_size > 0 and dtype', 'page_size > 0 and use != "decode" and dtype')),
    "page_of_one": changed("15.4", ("page_size > 0", "page_size > 1")),
    "any_head_dim_in_pages": changed("15.4", (PAGES, '("FlashInfer", "pages")')),
    "float32_in_pages": changed("15.4", ('page_size > 0 and dtype == "float32"', "False")),
    "not_split": changed("15.4", (SPLIT, "False")),
    "short_split": changed("15.4", (SPLIT, 'use == "decode" and programs < 100')),
    "full_split": changed("15.4", (SPLIT, 'use == "decode" and context >= 1024')),
    "full_split__by_one": changed("15.4", ("programs < 100", "programs <= 100")),
    "prefill_split": changed("15.4", (SPLIT, "programs < 100 and context >= 1024")),
    "one_token_late": changed("15.4", ("context >= 1024", "context > 1024")),
    "tensor_mask": changed("15.4", (TENSOR, "")),
    "rule_mask": changed("15.4", ('if mask == "rule":', "if False:")),
    "flex_on_turing": changed("15.4", (
        '"FlexAttention" if capability >= 80 else "SDPA", "mask"', '"FlexAttention", "mask"')),
    "float8_not_on_hopper": changed("15.4", ('"FlashAttention 3" if capability == 90 else "FlashInfer", "dtype"',
                                            '"FlashAttention 3", "dtype"')),
    "float8_not_on_hopper__blackwell": changed(
        "15.4",
        (
            '"FlashAttention 3" if capability == 90 else "FlashInfer", "dtype"',
            '"FlashAttention 3" if capability >= 90 else "FlashInfer", "dtype"',
        ),
    ),
    "float8_as_16_bits": changed("15.4", ('    if dtype == "float8":\n', "    if False:\n")),
    "flash_on_turing": changed("15.4", ("if capability < 80:\n", "if False:\n")),
    "float32_to_flash": changed("15.4", ('    if dtype == "float32":\n', "    if False:\n")),
    "long_heads": changed("15.4", ("if head_dim > 256 or capability == 100 and head_dim > 128:", "if False:")),
    "heads_of_256": changed("15.4", ("if head_dim > 256 or", "if head_dim >= 256 or")),
    "old_flash_on_hopper": changed("15.4", (LAST, '{100: "FlashAttention 4"}.get(capability, "FlashAttention 2")')),
    "old_flash_on_blackwell": changed("15.4", (LAST, '{90: "FlashAttention 3"}.get(capability, "FlashAttention 2")')),
    "float8_under_a_mask": changed("15.4", (' or mask in ("tensor", "rule")', "")),
    "float8_long_heads": changed("15.4", (" or head_dim > 256):", "):")),
    "masks_before_pages": changed("15.4", ("page_size > 0", 'page_size > 0 and mask in ("none", "causal")')),
    "masks_before_pages__tensor": changed("15.4", ("page_size > 0", 'page_size > 0 and mask != "tensor"')),
    "splits_before_masks": changed("15.4", ('if mask == "tensor":', f'if mask == "tensor" and not ({SPLIT}):'),
                                   ('if mask == "rule":', f'if mask == "rule" and not ({SPLIT}):')),
    "splits_before_masks__tensor": changed("15.4", (
        'if mask == "tensor":', f'if mask == "tensor" and not ({SPLIT}):')),
    "causal_as_a_rule": changed("15.4", ('if mask == "rule"', 'if mask in ("rule", "causal")')),
    "later_reason": changed("15.4", ('return "SDPA", "capability"',
                                     'return "SDPA", "dtype" if dtype == "float32" else "capability"')),
    "old_gpus_first": changed("15.4", ('    if page_size > 0 and dtype == "float32"',
                                       '    if capability < 80:\n        return "SDPA", "capability"\n'
                                       '    if page_size > 0 and dtype == "float32"')),
    "any_head_dim_in_pages__up_to_256": changed("15.4", ("head_dim in (64, 128, 256)", "head_dim <= 256")),
    "long_heads_on_blackwell": changed("15.4", (" or capability == 100 and head_dim > 128", "")),
    "float8_before_ada__on_80": changed("15.4", ("capability < 89", "capability < 80")),
    "float8_on_ada": changed("15.4", ("capability < 89", "capability < 90")),
    "float8_under_causal": changed("15.4", ('mask in ("tensor", "rule")', 'mask != "none"')),
    "float16_on_turing": changed("15.4", (BF16, 'if dtype in ("bfloat16", "float16") and capability < 80:')),
    "float8_heads_of_256": changed("15.4", ("or head_dim > 256):", "or head_dim >= 256):")),
    "float8_heads_of_128": changed("15.4", (
        "or head_dim > 256):", "or head_dim > (128 if capability == 100 else 256)):")),
    "float8_long_heads__in_pages": changed("15.4", (
        "or head_dim > 256):", "or page_size == 0 and head_dim > 256):")),
    "pages_late__training": changed("15.4", (
        BF16, f'if use == "training":\n        page_size = 0\n    {BF16}')),
    "float32_below_heads": changed("15.4", (
        'page_size > 0 and dtype == "float32"', 'page_size > 0 and dtype == "float32" and head_dim in (64, 128, 256)')),
    "reason_of_pages": changed("15.4", (PAGES, PAGES.replace('"head_dim"', '"pages"'))),
    "any_head_dim_in_pages__multiples": changed("15.4", ("in (64, 128, 256)", "in range(64, 257, 64)")),
    "any_head_dim_in_pages__powers": changed("15.4", (
        "head_dim in (64, 128, 256)", "head_dim <= 256 and head_dim.bit_count() == 1")),
    "prefill_split__not_training": changed("15.4", ('if use == "decode" and', 'if use != "training" and')),
    "reason_of_a_rule": changed("15.4", (
        'return "FlexAttention" if capability >= 80 else "SDPA", "mask"',
        'return ("FlexAttention", "mask") if capability >= 80 else ("SDPA", "capability")')),
    "float8_on_hopper": changed("15.4", (
        'return "FlashAttention 3" if capability == 90 else "FlashInfer", "dtype"', 'return "FlashInfer", "dtype"')),
    "heads_of_128": changed("15.4", ("and head_dim > 128", "and head_dim >= 128")),
    "heads_above_128": changed("15.4", ("capability == 100 and head_dim > 128", "capability >= 90 and head_dim > 128")),
    "odd_heads": changed("15.4", ("if head_dim > 256 or", "if head_dim % 8 or head_dim > 256 or")),
    "odd_heads__small": changed("15.4", ("if head_dim > 256 or", "if head_dim < 16 or head_dim > 256 or")),
    "no_flash_on_ada": changed("15.4", (LAST, LAST.replace("{90:", '{89: "FlashAttention 3", 90:'))),
    "no_flash_on_ada__sdpa": changed("15.4", (
        LAST, '{80: "FlashAttention 2", 90: "FlashAttention 3", 100: "FlashAttention 4"}.get(capability, "SDPA")')),
    "out_of_order": changed("15.4", (f"if {SPLIT}:", f'if {SPLIT} and not (dtype == "float8" and capability == 90):')),
    "out_of_order__float8_below_heads": changed("15.4", (
        '    if dtype == "float8":\n',
        '    if dtype == "float8" and not (head_dim > 256 or capability == 100 and head_dim > 128):\n')),
    "out_of_order__tensor_below_float32": changed("15.4", (
        'if mask == "tensor":', 'if mask == "tensor" and capability >= 80 and dtype != "float32":')),
}

UNUSUAL = {
    "by match": """# Exercise 15.4 · The chooser
def choose(capability, dtype, head_dim, mask, page_size, use, programs, context):
    newest = {"bfloat16": 80, "float8": 89}.get(dtype, 0)
    most = 128 if capability == 100 else 256
    refused = use == "training" or mask not in ("none", "causal") or head_dim >= 257
    if capability < newest or dtype == "float8" and refused:
        return "none", "dtype"
    match (page_size, dtype, mask):
        case (size, "float32", _) if size:
            return "course", "dtype"
        case (size, _, _) if size:
            return ("FlashInfer", "pages") if head_dim in {64, 128, 256} else ("course", "head_dim")
    if mask == "tensor" or mask == "rule":
        return ("FlexAttention" if mask == "rule" and capability > 75 else "SDPA"), "mask"
    if use == "decode" and not (programs >= 100 or context < 1024):
        return "split decode", "programs"
    if dtype == "float8":
        return ("FlashAttention 3" if capability == 90 else "FlashInfer"), "dtype"
    for fits, why in ((capability < 80, "capability"), (dtype == "float32", "dtype"), (head_dim > most, "head_dim")):
        if fits:
            return "SDPA", why
    return "FlashAttention " + ("3" if capability == 90 else "4" if capability > 90 else "2"), "capability"
""",
    "rows as a list": changed("15.4", (f"return {LAST}, \"capability\"",
        'rows = [(100, "FlashAttention 4"), (90, "FlashAttention 3"), (0, "FlashAttention 2")]\n'
        '    return next(name for least, name in rows if capability >= least), "capability"')),
    "a list for the pair": changed("15.4", (
        'return "split decode", "programs"', 'return ["split decode", "programs"]')),
}
