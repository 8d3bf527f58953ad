"""Exercise 15.4: which attention to call, and the one fact that decides it."""

from __future__ import annotations

from types import SimpleNamespace

from course_lib.checker import Case, Exercise, edits, model_of
from exercises.topics.tables import deciding, moves


def chosen(capability, dtype, head_dim, mask, page_size, use, programs, context):
    if dtype == "bfloat16" and capability < 80:
        return "none", "dtype"
    if dtype == "float8" and (capability < 89 or use == "training" or mask in ("tensor", "rule") or head_dim > 256):
        return "none", "dtype"
    if page_size > 0 and dtype == "float32":
        return "course", "dtype"
    if page_size > 0:
        return ("FlashInfer", "pages") if head_dim in (64, 128, 256) else ("course", "head_dim")
    if mask == "tensor":
        return "SDPA", "mask"
    if mask == "rule":
        return ("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")
    if use == "decode" and programs < 100 and context >= 1024:
        return "split decode", "programs"
    if dtype == "float8":
        return ("FlashAttention 3", "dtype") if capability == 90 else ("FlashInfer", "dtype")
    if capability < 80:
        return "SDPA", "capability"
    if dtype == "float32":
        return "SDPA", "dtype"
    if head_dim > 256 or capability == 100 and head_dim > 128:
        return "SDPA", "head_dim"
    if capability == 90:
        return "FlashAttention 3", "capability"
    if capability >= 100:
        return "FlashAttention 4", "capability"
    return "FlashAttention 2", "capability"


TABLE = (  # the rows of the statement, each line of them: when it fits, and what it says
    (lambda c: c.dtype == "bfloat16" and c.capability < 80, ("none", "dtype")),
    (lambda c: c.dtype == "float8" and c.capability < 89, ("none", "dtype")),
    (lambda c: c.dtype == "float8" and c.use == "training", ("none", "dtype")),
    (lambda c: c.dtype == "float8" and c.mask in ("tensor", "rule"), ("none", "dtype")),
    (lambda c: c.dtype == "float8" and c.head_dim > 256, ("none", "dtype")),
    (lambda c: c.page_size > 0 and c.dtype == "float32", ("course", "dtype")),
    (lambda c: c.page_size > 0 and c.head_dim not in (64, 128, 256), ("course", "head_dim")),
    (lambda c: c.page_size > 0, ("FlashInfer", "pages")),
    (lambda c: c.mask == "tensor", ("SDPA", "mask")),
    (lambda c: c.mask == "rule" and c.capability >= 80, ("FlexAttention", "mask")),
    (lambda c: c.mask == "rule", ("SDPA", "mask")),
    (lambda c: c.use == "decode" and c.programs < 100 and c.context >= 1024, ("split decode", "programs")),
    (lambda c: c.dtype == "float8" and c.capability == 90, ("FlashAttention 3", "dtype")),
    (lambda c: c.dtype == "float8", ("FlashInfer", "dtype")),
    (lambda c: c.capability < 80, ("SDPA", "capability")),
    (lambda c: c.dtype == "float32", ("SDPA", "dtype")),
    (lambda c: c.head_dim > 256, ("SDPA", "head_dim")),
    (lambda c: c.capability == 100 and c.head_dim > 128, ("SDPA", "head_dim")),
    (lambda c: c.capability == 90, ("FlashAttention 3", "capability")),
    (lambda c: c.capability == 100, ("FlashAttention 4", "capability")),
    (lambda c: True, ("FlashAttention 2", "capability")),
)  # fmt: skip


def by_table(*arguments):
    return next(says for fits, says in TABLE if fits(SimpleNamespace(**dict(zip(LEVELS, arguments)))))


LEVELS = {  # in the order of the arguments
    "capability": (75, 80, 89, 90, 100), "dtype": ("float32", "float16", "bfloat16", "float8"),
    "head_dim": (1, 20, 32, 64, 100, 128, 129, 192, 255, 256, 257, 512), "mask": ("none", "causal", "tensor", "rule"),
    "page_size": (0, 1, 16), "use": ("training", "prefill", "decode"), "programs": (1, 99, 100, 1000),
    "context": (1, 1023, 1024, 100_000),
}  # fmt: skip
SHARES = {  # how often each value is drawn
    "capability": (2, 1, 1, 2, 1), "dtype": (2, 2, 2, 4), "mask": (3, 3, 2, 2), "page_size": (4, 1, 1),
}  # fmt: skip


def chooser_cases(draw):
    taught = taught_cases()
    calls = deciding(draw, TABLE, LEVELS, SHARES, [dict(zip(LEVELS, case.args)) for case in taught])
    return taught + [Case(in_words(**call), tuple(call.values())) for call in calls]


def in_words(capability, dtype, head_dim, mask, page_size, use, programs, context):
    pages = f"pages of {page_size}" if page_size else "no pages"
    return f"sm_{capability}, {dtype}, head_dim {head_dim}, mask {mask}, {pages}, {use}, {programs=}, {context=}"


def taught_cases():
    return [
        Case("training on an H100, bfloat16, causal", (90, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("training on a B200, bfloat16, causal", (100, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("training on a T4, bfloat16, causal", (75, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("a server's decode, pages of 16", (90, "bfloat16", 128, "none", 16, "decode", 512, 8192)),
        Case("one user, pages of 16, head dimension 96", (90, "float16", 96, "none", 16, "decode", 8, 32768)),
        Case("one user, a long context, no pages", (80, "float16", 128, "none", 0, "decode", 8, 32768)),
        Case("a mask from a file", (90, "bfloat16", 128, "tensor", 0, "training", 256, 4096)),
        Case("documents packed into one row", (90, "bfloat16", 128, "rule", 0, "training", 256, 8192)),
        Case("documents packed into one row, on a T4", (75, "float16", 64, "rule", 0, "training", 256, 2048)),
        Case("FP8 on an H100", (90, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("FP8 on a B200", (100, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("head dimension 512 on a B200", (100, "bfloat16", 512, "none", 0, "prefill", 256, 4096)),
        Case("one user, a mask as a tensor, no pages", (80, "float16", 128, "tensor", 0, "decode", 8, 32768)),
        Case("pages, and a mask as a rule", (90, "bfloat16", 64, "rule", 16, "prefill", 256, 4096)),
        Case("FP8 with head dimension 512", (90, "float8", 512, "causal", 0, "prefill", 256, 4096)),
    ]


BF16 = 'dtype == "bfloat16" and capability < 80'
FP8 = 'dtype == "float8" and (capability < 89 or use == "training" or mask in ("tensor", "rule") or head_dim > 256)'
SPLIT = 'use == "decode" and programs < 100 and context >= 1024'
LONG = "head_dim > 256 or capability == 100 and head_dim > 128"
RULE, FLOAT8 = 'mask == "rule"', '("FlashAttention 3", "dtype") if capability == 90 else ("FlashInfer", "dtype")'
PAGED, HEADS = 'page_size > 0 and dtype == "float32"', "head_dim in (64, 128, 256)"
PIECES = (
    BF16, FP8, PAGED, "if page_size > 0:", 'if mask == "tensor":', f"if {RULE}:", SPLIT, 'if dtype == "float8":',
    "if capability < 80:", 'if dtype == "float32":', LONG, "if capability == 90:", "if capability >= 100:",
)  # fmt: skip
# Moves that change nothing, or that another sentence says better: below which rows, and above which.
BELOW = {0: (1, 2, 8, 9, 10, 11, 12), 1: (2,), 2: range(3, 13), 4: (5, 6, 7), 5: (6, 7, 8), 7: (8, 9),
         8: range(9, 13), 11: (12,)}  # fmt: skip
ABOVE = {0: (2,), 2: (4, 5, 8), 4: (6, 7), 5: (7, 8), 7: (9,)}

OLD = "capability < 80"
LATER = {7: OLD, 8: f'{OLD} or dtype == "float32"', 9: f'{OLD} or dtype == "float32" or {LONG}'}  # rows below SPLIT

CHANGES = (
    *edits("bfloat16 was given to a GPU before sm_80, which cannot compute in it: row 1.",
        bfloat16_on_turing=(BF16, "False")),
    *edits("float8 was given to a GPU before sm_89, which cannot compute in it: row 1.",
        float8_before_ada=("capability < 89 or ", ""), float8_before_ada__on_80=("capability < 89", "capability < 80")),
    *edits("float8 was refused on sm_89. Row 1 refuses it before sm_89 only.", float8_on_ada=("capability < 89",
        "capability < 90")),
    *edits("float8 was refused under a causal mask. Row 1 refuses it with a mask given as a tensor or a rule only.",
        float8_under_causal=('mask in ("tensor", "rule")', 'mask != "none"')),
    *edits("float16 was refused before sm_80. Row 1 refuses only bfloat16 there.",
        float16_on_turing=(BF16, 'dtype in ("bfloat16", "float16") and capability < 80')),
    *edits("float8 was refused with a head dimension of exactly 256. Row 1 begins above it.",
        float8_heads_of_256=(FP8, FP8.replace("head_dim > 256", "head_dim >= 256"))),
    *edits("float8 was refused with a head dimension above 128 on sm_100. That limit is FlashAttention 4's, in row 9. "
        "Row 1 begins above 256 on every GPU.", float8_heads_of_128=(FP8, FP8.replace("head_dim > 256",
        "head_dim > 256 or capability == 100 and head_dim > 128"))),
    *edits("float8 was chosen for training. None of these libraries has a backward pass that takes it: row 1.",
        float8_in_training=('use == "training" or ', "")),
    *edits("float8 was chosen with a mask given as a tensor or a rule. The kernels for float8 take neither: row 1.",
        float8_under_a_mask=(' or mask in ("tensor", "rule")', "")),
    *edits("float8 was chosen with a head dimension above 256. No kernel of the table takes both: row 1.",
        float8_long_heads=(FP8, FP8.replace(" or head_dim > 256", "")), float8_long_heads__in_pages=(FP8,
        FP8.replace("head_dim > 256", "head_dim > 256 and page_size == 0"))),
    *edits("Pages were checked too late, or not at all. A kernel for contiguous tensors cannot read pages, so row 2 "
        "comes before decode, masks and GPUs.", pages_late=("page_size > 0", "page_size > 0 and use != 'decode'"),
        pages_late__never=("page_size > 0", "False"), pages_late__training=("page_size > 0", "page_size > 0 and use != "
        "'training'"), pages_late__decode_alone=("page_size > 0", "page_size > 0 and use == 'decode'")),
    *edits("Pages in float32 got the reason \"head_dim\". The line for float32 stands above the one for head "
        "dimensions: row 2.", float32_below_heads=(PAGED, f"{PAGED} and {HEADS}")),
    *edits("Pages with a head dimension that FlashInfer does not have got the reason \"pages\". The head dimension "
        "decides: row 2.", reason_of_pages=('("course", "head_dim")', '("course", "pages")')),
    *edits("Masks were checked before pages. A kernel for contiguous tensors cannot read pages, so row 2 comes first.",
        masks_before_pages=("page_size > 0", "page_size > 0 and mask not in ('tensor', 'rule')"),
        masks_before_pages__tensor=("page_size > 0", "page_size > 0 and mask != 'tensor'"),
        masks_before_pages__rule=("page_size > 0", "page_size > 0 and mask != 'rule'")),
    *edits("Split decode was checked before masks. Its kernel takes no mask, so rows 3 and 4 come first.",
        splits_before_masks=('mask == "tensor"', f'mask == "tensor" and not ({SPLIT})', RULE,
        f"{RULE} and not ({SPLIT})"), splits_before_masks__tensor=('mask == "tensor"',
        f'mask == "tensor" and not ({SPLIT})'), splits_before_masks__rule=(RULE, f"{RULE} and not ({SPLIT})")),
    *edits("GPUs before sm_80 were checked too early. The rows above row 7 hold for these GPUs, too.",
        old_gpus_first=("page_size > 0", "page_size > 0 and capability >= 80", SPLIT, f"{SPLIT} and capability >= 80",
        'mask == "tensor"', 'mask == "tensor" and capability >= 80', 'mask == "rule"',
        'mask == "rule" and capability >= 80')),
    *edits("A causal mask was taken for a rule. \"causal\" is a mask of its own here, and every kernel of the table "
        "takes it.", causal_as_a_rule=('mask == "rule"', 'mask in ("rule", "causal")')),
    *edits("The reason is that of a later row. On a GPU before sm_80 the capability decides: "
        "row 7.", later_reason=('return "SDPA", "capability"',
        'return "SDPA", "dtype" if dtype == "float32" else "capability"'),
        later_reason__heads=('return "SDPA", "capability"',
        'return "SDPA", "dtype" if dtype == "float32" else "head_dim" if head_dim > 256 else "capability"')),
    *edits("Pages of one token were taken for no pages. `page_size` is 0 only where K and V are contiguous.",
        page_of_one=("page_size > 0", "page_size > 1")),
    *edits("FlashInfer was given a head dimension for which it has no kernel. It has kernels for 64, 128 and 256: row "
        "2.", any_head_dim_in_pages=(HEADS, "True"), any_head_dim_in_pages__up_to_256=(HEADS, "head_dim <= 256"),
        any_head_dim_in_pages__multiples=(HEADS, "head_dim % 64 == 0 and head_dim <= 256"),
        any_head_dim_in_pages__of_8=(HEADS, "head_dim % 8 == 0 and head_dim <= 256"),
        any_head_dim_in_pages__powers=(HEADS, "head_dim.bit_count() == 1 and head_dim <= 256")),
    *edits("FlashInfer was given float32. Pages in float32 are for the course's own kernel: row 2.",
        float32_in_pages=(PAGED, "False")),
    *edits("Decode with few programs was not split, so most of the GPU is idle: row 5.", not_split=(SPLIT, "False")),
    *edits("Decode with a short context was split. Below 1,024 tokens, merging the splits costs what splitting gains: "
        "row 5.", short_split=(SPLIT, 'use == "decode" and programs < 100')),
    *edits("Decode was split, although 100 programs or more fill the GPU: row 5.", full_split=(SPLIT,
        'use == "decode" and context >= 1024'), full_split__by_one=("programs < 100", "programs <= 100")),
    *edits("Prefill or training was split. There the GPU is full, because each tile of queries has a program: row 5 is "
        "only for decode.", prefill_split=(SPLIT, "programs < 100 and context >= 1024"), prefill_split__alone=(SPLIT,
        SPLIT.replace('use == "decode"', 'use != "training"'))),
    *edits("A context of exactly 1,024 tokens was not split. Row 5 begins there.",
        one_token_late=("context >= 1024", "context > 1024")),
    *edits("A mask given as a tensor went to a kernel that does not take one. In this table only SDPA does: row 3.",
        tensor_mask=('mask == "tensor"', "False"), tensor_mask__flex=('return "SDPA", "mask"\n    if mask == "rule"',
        'return "FlexAttention", "mask"\n    if mask == "rule"')),
    *edits("A mask given as a rule did not go to FlexAttention, which compiles a kernel for it on sm_80 and later: row "
        "5.", rule_mask=('mask == "rule"', "False"),
        rule_mask__sdpa=('("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")', '("SDPA", "mask")')),
    *edits("FlexAttention was chosen for a GPU before sm_80. The table has SDPA there: row 4.",
        flex_on_turing=('("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")',
        '("FlexAttention", "mask")')),
    *edits("A mask given as a rule got the reason \"capability\" before sm_80. The mask decides there, too: row 4.",
        reason_of_a_rule=('("SDPA", "mask")', '("SDPA", "capability")')),
    *edits("float8 on sm_90 got FlashInfer. Row 6 has FlashAttention 3 there.",
        float8_on_hopper=(FLOAT8, '("FlashInfer", "dtype")')),
    *edits("FlashAttention 3 was chosen for float8 on a GPU that is not a Hopper: row 6.",
        float8_not_on_hopper=('("FlashAttention 3", "dtype") if capability == 90 else ("FlashInfer", "dtype")',
        '("FlashAttention 3", "dtype")'),
        float8_not_on_hopper__blackwell=('("FlashAttention 3", "dtype") if capability == 90',
        '("FlashAttention 3", "dtype") if capability >= 90')),
    *edits("float8 went to a kernel for 16 bits: row 6.",
        float8_as_16_bits=('if dtype == "float8":\n        return (', 'if False:\n        return (')),
    *edits("FlashAttention was chosen for a GPU before sm_80. There you call SDPA, which runs its memory-efficient "
        "backend: row 7.", flash_on_turing=('if capability < 80:\n        return "SDPA", "capability"',
        'if False:\n        return "SDPA", "capability"')),
    *edits("FlashAttention was given float32, but it computes in 16 bits: row 8.",
        float32_to_flash=('if dtype == "float32":\n        return "SDPA", "dtype"',
        'if False:\n        return "SDPA", "dtype"')),
    *edits("FlashAttention was given a head dimension above 256, which it does not take: row 9.", long_heads=(LONG,
        "False"), long_heads__but_blackwell=(LONG, "capability == 100 and head_dim > 128")),
    *edits("FlashAttention 4 was given a head dimension above 128, which it does not take on sm_100: row 9.",
        long_heads_on_blackwell=(LONG, "head_dim > 256")),
    *edits("A head dimension of exactly 256 was refused. Row 9 begins above it.", heads_of_256=(LONG,
        LONG.replace("> 256", ">= 256"))),
    *edits("A head dimension of exactly 128 was refused on sm_100. Row 9 begins above it.",
        heads_of_128=(LONG, LONG.replace("> 128", ">= 128"))),
    *edits("A head dimension above 128 was refused on another GPU than sm_100. That limit is for sm_100 alone: row 9.",
        heads_above_128=(LONG, LONG.replace("capability == 100", "capability >= 90")),
        heads_above_128__everywhere=(LONG, "head_dim > 128")),
    *edits("A head dimension was refused because it is small, or no multiple of 8. Row 9 refuses only what is above "
        "its limit.", odd_heads=(LONG, f"head_dim % 8 != 0 or {LONG}"), odd_heads__small=(LONG,
        f"head_dim < 16 or {LONG}"), odd_heads__powers=(LONG, f"head_dim.bit_count() > 1 or {LONG}")),
    *edits("A Hopper got FlashAttention 2, which does not use Hopper's matrix unit and copy engine: row 10.",
        old_flash_on_hopper=('return "FlashAttention 3", "capability"', 'return "FlashAttention 2", "capability"')),
    *edits("A Blackwell got a kernel for an older generation. Choose FlashAttention 4: row 11.",
        old_flash_on_blackwell=('return "FlashAttention 4", "capability"', 'return "FlashAttention 2", "capability"'),
        old_flash_on_blackwell__3=("capability == 90:\n        return \"FlashAttention 3\", \"capability\"",
        "capability >= 90:\n        return \"FlashAttention 3\", \"capability\"")),
    *edits("sm_89 did not get FlashAttention 2, which is for all GPUs from sm_80 on but sm_90 and sm_100: row 11.",
        no_flash_on_ada=("capability == 90:", "capability in (89, 90):"),
        no_flash_on_ada__sdpa=('return "FlashAttention 2", "capability"',
        'return "SDPA" if capability == 89 else "FlashAttention 2", "capability"')),
    *edits("Two rows of the table fit, and the lower one was returned. The first row that fits decides, so check the "
        "rows in the order of the table.", alone=True, **moves("out_of_order", PIECES, BELOW, ABOVE),
        **{f"out_of_order__mask_below_{row}": ('mask == "tensor"', f'mask == "tensor" and not ({passed})')
           for row, passed in LATER.items()},
        out_of_order__hopper=(SPLIT, f'{SPLIT} and not (dtype == "float8" and capability == 90)')),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.4",
    title="The chooser",
    entries=("choose",),
    cases=chooser_cases,
    oracle=by_table,
    models=(model_of(chosen, CHANGES),),
    hints=(
        "Write the rows as a chain of `if`s that return, in the order of the table. The first row that fits decides, "
        "so a row does not have to repeat what the rows above have excluded.",
        "Begin with row 1: bfloat16 needs sm_80, and float8 needs sm_89 and no training, among other things. Then "
        "check for pages, because a kernel that cannot read pages gives no answer at all, however fast it is.",
        "Split only if three things hold: use is \"decode\", programs < 100, and context >= 1024. Otherwise go on to "
        "the rows below, because a decode of many users can take an ordinary kernel.",
        "The reason is the argument that decided: (\"SDPA\", \"mask\") in row 3, (\"SDPA\", \"capability\") in row 7, "
        "(\"SDPA\", \"dtype\") in row 8, (\"SDPA\", \"head_dim\") in row 9.",
    ),
)  # fmt: skip
