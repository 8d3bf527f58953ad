"""Exercise 15.4: which attention to call, and the one fact that decides it."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def chosen(capability, dtype, head_dim, mask, page_size, use, programs, context):
    if dtype == "bfloat16" and capability < 80:
        return "none", "dtype"
    if dtype == "float8" and (capability < 89 or use == "training" or mask in ("tensor", "rule") or head_dim > 256):
        return "none", "dtype"
    if page_size > 0 and dtype == "float32":
        return "course", "dtype"
    if page_size > 0:
        return ("FlashInfer", "pages") if head_dim in (64, 128, 256) else ("course", "head_dim")
    if use == "decode" and programs < 100 and context >= 1024:
        return "split decode", "programs"
    if mask == "tensor":
        return "SDPA", "mask"
    if mask == "rule":
        return ("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")
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


CAPABILITIES, DTYPES = (75, 80, 89, 90, 100), ("float32", "float16", "bfloat16", "float8")
MASKS, USES = ("none", "causal", "tensor", "rule"), ("training", "prefill", "decode")


def chooser_cases(draw):
    return [
        Case("training on an H100, bfloat16, causal", (90, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("training on an A100, bfloat16, causal", (80, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("training on a B200, bfloat16, causal", (100, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("training on a T4, bfloat16, causal", (75, "bfloat16", 128, "causal", 0, "training", 512, 8192)),
        Case("a T4 with float16", (75, "float16", 64, "causal", 0, "prefill", 64, 2048)),
        Case("a server's decode, pages of 16", (90, "bfloat16", 128, "none", 16, "decode", 512, 8192)),
        Case("one user, pages of 16, head dimension 96", (90, "float16", 96, "none", 16, "decode", 8, 32768)),
        Case("pages and float32", (80, "float32", 128, "none", 16, "decode", 64, 4096)),
        Case("one user, a long context, no pages", (80, "float16", 128, "none", 0, "decode", 8, 32768)),
        Case("a T4's decode, one user", (75, "float16", 128, "none", 0, "decode", 8, 4096)),
        Case("one user, 500 tokens", (90, "float16", 128, "none", 0, "decode", 8, 500)),
        Case("99 programs, 1,024 tokens", (80, "float16", 128, "none", 0, "decode", 99, 1024)),
        Case("100 programs, 1,024 tokens", (80, "float16", 128, "none", 0, "decode", 100, 1024)),
        Case("few programs in prefill", (80, "float16", 128, "causal", 0, "prefill", 8, 4096)),
        Case("a mask from a file", (90, "bfloat16", 128, "tensor", 0, "training", 256, 4096)),
        Case("documents packed into one row", (90, "bfloat16", 128, "rule", 0, "training", 256, 8192)),
        Case("documents packed into one row, float32", (80, "float32", 64, "rule", 0, "training", 256, 8192)),
        Case("documents packed into one row, on a T4", (75, "float16", 64, "rule", 0, "training", 256, 2048)),
        Case("FP8 on an H100", (90, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("FP8 on an L4", (89, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("FP8 on a B200", (100, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("FP8 on an A100", (80, "float8", 128, "causal", 0, "prefill", 256, 8192)),
        Case("FP8 in training", (90, "float8", 128, "causal", 0, "training", 256, 8192)),
        Case("an FP8 cache in pages", (90, "float8", 128, "none", 64, "decode", 256, 8192)),
        Case("a cache of bfloat16 on a T4, in pages", (75, "bfloat16", 128, "none", 16, "decode", 64, 2048)),
        Case("float32 on an H100", (90, "float32", 128, "causal", 0, "training", 256, 4096)),
        Case("head dimension 512", (90, "bfloat16", 512, "none", 0, "prefill", 256, 4096)),
        Case("head dimension 256", (80, "float16", 256, "none", 0, "prefill", 256, 4096)),
        Case("one user, a mask as a tensor, no pages", (80, "float16", 128, "tensor", 0, "decode", 8, 32768)),
        Case("one user, a mask as a rule, no pages", (90, "bfloat16", 128, "rule", 0, "decode", 8, 32768)),
        Case("pages, and a mask as a tensor", (90, "bfloat16", 128, "tensor", 16, "prefill", 256, 4096)),
        Case("pages, and a mask as a rule", (90, "bfloat16", 64, "rule", 16, "prefill", 256, 4096)),
        Case("float32 on a T4", (75, "float32", 128, "causal", 0, "prefill", 256, 4096)),
        Case("head dimension 512 on a T4", (75, "float16", 512, "none", 0, "prefill", 256, 4096)),
        Case("one user's decode in pages on a T4", (75, "float16", 128, "none", 16, "decode", 8, 4096)),
        Case("FP8 under a mask as a tensor", (90, "float8", 128, "tensor", 0, "prefill", 256, 4096)),
        Case("FP8 with head dimension 512", (90, "float8", 512, "causal", 0, "prefill", 256, 4096)),
        Case("head dimension 192 on a B200", (100, "bfloat16", 192, "causal", 0, "training", 256, 4096)),
        Case("head dimension 192 on an H100", (90, "bfloat16", 192, "causal", 0, "training", 256, 4096)),
        Case("head dimension 80 in pages", (90, "bfloat16", 80, "causal", 16, "prefill", 256, 4096)),
        Case("a decode of many users without pages", (90, "bfloat16", 128, "none", 0, "decode", 512, 4096)),
    ]


CONTRACT = Contract(
    lambda draw, *, capability, dtype, head_dim, mask, page_size, use, programs, context: (
        capability, dtype, head_dim, mask, page_size, use, programs, context,
    ),
    choices={
        "capability": CAPABILITIES, "dtype": DTYPES, "head_dim": (64, 80, 128, 192, 512), "mask": MASKS,
        "page_size": (0, 1, 64), "use": USES, "programs": (1, 99, 100, 1000), "context": (1, 1023, 1024, 100_000),
    },
    says={"capability": "75, 80, 89, 90 or 100", "page_size": "0 where K and V are contiguous"},
    most=40,
)  # fmt: skip

BF16 = 'dtype == "bfloat16" and capability < 80'
FP8 = 'dtype == "float8" and (capability < 89 or use == "training" or mask in ("tensor", "rule") or head_dim > 256)'
SPLIT = 'use == "decode" and programs < 100 and context >= 1024'
LONG = "head_dim > 256 or capability == 100 and head_dim > 128"
PAGED, HEADS = 'page_size > 0 and dtype == "float32"', "head_dim in (64, 128, 256)"
CHANGES = (
    *edits("bfloat16 was given to a GPU before sm_80, which cannot compute in it: row 1.",
        bfloat16_on_turing=(BF16, "False")),
    *edits("float8 was given to a GPU before sm_89, which cannot compute in it: row 1.",
        float8_before_ada=("capability < 89 or ", "")),
    *edits("float8 was chosen for training. None of these libraries has a backward pass that takes it: row 1.",
        float8_in_training=('use == "training" or ', "")),
    *edits("float8 was chosen with a mask given as a tensor or a rule. The kernels for float8 take neither: row 1.",
        float8_under_a_mask=(' or mask in ("tensor", "rule")', "")),
    *edits("float8 was chosen with a head dimension above 256. No kernel of the table takes both: row 1.",
        float8_long_heads=(FP8, FP8.replace(
        " or head_dim > 256", ""))),
    *edits("Pages were checked too late, or not at all. A kernel for contiguous tensors cannot read pages, so row 2 "
        "comes before decode, masks and GPUs.", pages_late=("page_size > 0", "page_size > 0 and use != 'decode'"),
        pages_late__never=("page_size > 0", "False")),
    *edits("Masks were checked before pages. A kernel for contiguous tensors cannot read pages, so row 2 comes first.",
        masks_before_pages=("page_size > 0", "page_size > 0 and mask not in ('tensor', 'rule')"),
        masks_before_pages__tensor=("page_size > 0", "page_size > 0 and mask != 'tensor'"),
        masks_before_pages__rule=("page_size > 0", "page_size > 0 and mask != 'rule'")),
    *edits("Masks were checked before split decode. Row 3 comes first.",
        masks_before_splits=(SPLIT, f"{SPLIT} and mask not in ('tensor', 'rule')"),
        masks_before_splits__tensor=(SPLIT, f"{SPLIT} and mask != 'tensor'")),
    *edits("GPUs before sm_80 were checked too early. The rows above row 7 hold for these GPUs, too.",
        old_gpus_first=("page_size > 0", "page_size > 0 and capability >= 80", SPLIT, f"{SPLIT} and capability >= 80",
        'mask == "tensor"', 'mask == "tensor" and capability >= 80', 'mask == "rule"',
        'mask == "rule" and capability >= 80')),
    *edits("A causal mask was taken for a rule. \"causal\" is a mask of its own here, and every kernel of the table "
        "takes it.",
        causal_as_a_rule=('mask == "rule"', 'mask in ("rule", "causal")')),
    *edits("The kernel is right, but the reason is that of a later row. On a GPU before sm_80 the capability decides: "
        "row 7.", later_reason=('return "SDPA", "capability"',
        'return "SDPA", "dtype" if dtype == "float32" else "capability"'),
        later_reason__heads=('return "SDPA", "capability"',
        'return "SDPA", "dtype" if dtype == "float32" else "head_dim" if head_dim > 256 else "capability"')),
    *edits("Pages of one token were taken for no pages. `page_size` is 0 only where K and V are contiguous.",
        page_of_one=("page_size > 0", "page_size > 1")),
    *edits("FlashInfer was given a head dimension for which it has no kernel. It has kernels for 64, 128 and 256: row "
        "2.",
        any_head_dim_in_pages=(HEADS, "True"),
        any_head_dim_in_pages__up_to_256=(HEADS, "head_dim <= 256")),
    *edits("FlashInfer was given float32. Pages in float32 are for the course's own kernel: row 2.",
        float32_in_pages=(PAGED, "False")),
    *edits("Decode with few programs was not split, so most of the GPU is idle: row 3.",
        not_split=(SPLIT, "False")),
    *edits("Decode with a short context was split. Below 1,024 tokens, merging the splits costs what splitting gains: "
        "row 3.",
        short_split=(SPLIT, 'use == "decode" and programs < 100')),
    *edits("Decode was split, although 100 programs or more fill the GPU: row 3.",
        full_split=(SPLIT, 'use == "decode" and context >= 1024'), full_split__by_one=("programs < 100",
        "programs <= 100")),
    *edits("Prefill or training was split. There the GPU is full, because each tile of queries has a program: row 3 "
        "is only for decode.",
        prefill_split=(SPLIT, "programs < 100 and context >= 1024")),
    *edits("A context of exactly 1,024 tokens was not split. Row 3 begins there.",
        one_token_late=("context >= 1024", "context > 1024")),
    *edits("A mask given as a tensor went to a kernel that does not take one. In this table only SDPA does: row 4.",
        tensor_mask=('mask == "tensor"', "False"), tensor_mask__flex=('return "SDPA", "mask"\n    if mask == "rule"',
        'return "FlexAttention", "mask"\n    if mask == "rule"')),
    *edits("A mask given as a rule did not go to FlexAttention, which compiles a kernel for it on sm_80 and later: "
        "row 5.",
        rule_mask=('mask == "rule"', "False"),
        rule_mask__sdpa=('("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")', '("SDPA", "mask")')),
    *edits("FlexAttention was chosen for a GPU before sm_80. The table has SDPA there: row 5.",
        flex_on_turing=('("FlexAttention", "mask") if capability >= 80 else ("SDPA", "mask")',
        '("FlexAttention", "mask")')),
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
    *edits("FlashAttention was given a head dimension above 256, which it does not take: row 9.",
        long_heads=(LONG, "False"),
        long_heads__but_blackwell=(LONG, "capability == 100 and head_dim > 128")),
    *edits("FlashAttention 4 was given a head dimension above 128, which it does not take on sm_100: row 9.",
        long_heads_on_blackwell=(LONG,
        "head_dim > 256")),
    *edits("A head dimension of exactly 256 was refused. Row 9 begins above it.", heads_of_256=(LONG,
        LONG.replace("> 256", ">= 256"))),
    *edits("A Hopper got FlashAttention 2, which does not use Hopper's matrix unit and copy engine: row 10.",
        old_flash_on_hopper=('return "FlashAttention 3", "capability"', 'return "FlashAttention 2", "capability"')),
    *edits("A Blackwell got a kernel for an older generation. Choose FlashAttention 4: row 11.",
        old_flash_on_blackwell=('return "FlashAttention 4", "capability"', 'return "FlashAttention 2", "capability"'),
        old_flash_on_blackwell__3=("capability == 90:\n        return \"FlashAttention 3\", \"capability\"",
        "capability >= 90:\n        return \"FlashAttention 3\", \"capability\"")),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.4",
    title="The chooser",
    entries=("choose",),
    cases=chooser_cases,
    oracle=chosen,
    contracts=(CONTRACT,),
    models=(model_of(chosen, CHANGES),),
    hints=(
        "Write the rows as a chain of `if`s that return, in the order of the table. The first row that fits decides, "
        "so a row does not have to repeat what the rows above have excluded.",
        "Begin with row 1: bfloat16 needs sm_80, and float8 needs sm_89 and no training, among other things. Then "
        "check for pages, because a kernel that cannot read pages gives no answer at all, however fast it is.",
        "Split only if three things hold: use is \"decode\", programs < 100, and context >= 1024. Otherwise go on to "
        "the rows below, because a decode of many users can take an ordinary kernel.",
        "The reason is the argument that decided: (\"SDPA\", \"mask\") in row 4, (\"SDPA\", \"capability\") in row 7, "
        "(\"SDPA\", \"dtype\") in row 8, (\"SDPA\", \"head_dim\") in row 9.",
    ),
)  # fmt: skip
