"""Exercise 13.1: what a fused kernel moves, and the bytes of a Llama layer's glue, operation by operation and fused."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def moved(steps, sizes, kept):
    read, made, total = set(), set(), 0
    for inputs, output in steps:
        for name in dict.fromkeys(inputs):
            if name not in made and name not in read:
                total += sizes[name]
                read.add(name)
        made.add(output)
        if output in kept:
            total += sizes[output]
    return total


def one_by_one(tokens, hidden, intermediate, query_heads, key_heads, head_dim, item_bytes):
    cast = 0 if item_bytes == 4 else item_bytes + 4
    summing = 3 * item_bytes
    normalising = 2 * cast + 8 + 4 + 8 + 2 * item_bytes
    norms = 2 * (tokens * hidden * (summing + normalising) + hidden * item_bytes)
    turned = tokens * (query_heads + key_heads) * head_dim
    table = tokens * head_dim * item_bytes
    rotating = 10 * turned * item_bytes + 4 * table
    activating = 5 * tokens * intermediate * item_bytes
    return norms + rotating + activating


def in_four_kernels(tokens, hidden, intermediate, query_heads, key_heads, head_dim, item_bytes):
    norms = 2 * (4 * tokens * hidden * item_bytes + hidden * item_bytes)
    turned = tokens * (query_heads + key_heads) * head_dim
    table = tokens * head_dim * item_bytes
    rotating = 2 * turned * item_bytes + 2 * table
    activating = 3 * tokens * intermediate * item_bytes
    return norms + rotating + activating


NORM = ((("x", "residual"), "summed"), (("summed",), "inverse"), (("summed", "inverse", "weight"), "normalised"))
LLAMA = (4096, 14336, 32, 8, 128)  # hidden, intermediate, query heads, KV heads, head dimension


def ledger_cases(draw):
    big, small, row = draw.integer(500, 9000), draw.integer(20, 90), draw.integer(2, 19)
    sizes = {"x": big, "residual": big, "summed": big, "inverse": row, "weight": small, "normalised": big}
    odd = (draw.integer(3, 40), 37, 101, 6, 2, 10)
    cases = [
        Case("one step", ((((("x", "y"), "sum"),), {"x": 8, "y": 80, "sum": 800}, ("sum",))), "kernel_bytes"),
        Case("add and norm, only the norm kept", (NORM, sizes, ("normalised",)), "kernel_bytes"),
        Case("add and norm, both kept", (NORM, sizes, ("normalised", "summed")), "kernel_bytes"),
        Case("its last step alone", (NORM[2:], sizes, ("normalised",)), "kernel_bytes"),
        Case(
            "x · x, and x once more",
            (((("x", "x"), "square"), (("square", "x"), "cube")), {"x": small, "square": big, "cube": row}, ("cube",)),
            "kernel_bytes",
        ),
        Case("nothing is read later", (NORM[:1], sizes, ()), "kernel_bytes"),
    ]
    for entry in ("eager_glue_bytes", "fused_glue_bytes"):
        cases += [
            Case("Llama-3-8B, 16,384 tokens, 16 bits", (16384, *LLAMA, 2), entry),
            Case("one token", (1, *LLAMA, 2), entry),
            Case("Llama-3-8B, 4,096 tokens, 32 bits", (4096, *LLAMA, 4), entry),
            Case(f"{odd[0]} tokens of 37 numbers, 6 heads on 2", (*odd, 2), entry),
        ]
    return cases


def _glue(entry):
    return Contract(
        lambda draw, *, tokens, query_heads, key_heads, item_bytes: (
            tokens, draw.integer(5, 70), draw.integer(80, 200), query_heads * key_heads, key_heads, 12, item_bytes,
        ),
        choices={"tokens": (1, 7, 5000), "query_heads": (1, 4), "key_heads": (1, 3), "item_bytes": (2, 4)},
        says={"item_bytes": "2 or 4", "query_heads": "a multiple of key_heads"},
        entry=entry,
        most=6,
    )  # fmt: skip


READ_TWICE = "name not in made and name not in read"
KERNEL = (
    *edits("Every step was counted as a kernel of its own. Inside one kernel a result stays in registers: the next "
        "step does not read it from memory, and only what is in `kept` is written.",
        steps_alone=(READ_TWICE, "True", "output in kept", "True")),
    *edits("What a step of the same kernel has made was read from memory. It is still in registers.",
        made_and_read=(READ_TWICE, "name not in read")),
    *edits("Every step's result was written. Only those in `kept` are read later by anyone else.",
        all_written=("output in kept", "True")),
    *edits("A result was written that is not in `kept`: the last step's. Nobody reads that one later either.",
        last_always_written=("output in kept", "(output in kept or output == steps[-1][1])")),
    *edits("Those results were written that are not in `kept`. `kept` names the ones that are read later.",
        others_written=("output in kept", "output not in kept")),
    *edits("Only the first step's inputs were read. A later step may need a tensor that no step before it has read or "
        "made.", first_step_alone_read=(READ_TWICE, f"{READ_TWICE} and inputs is steps[0][0]")),
    *edits("Only the last step's result was written. `kept` names all results that are read later.",
        last_alone_written=("output in kept", "output in kept and output == steps[-1][1]")),
    *edits("A tensor that two steps need was read twice. The kernel has it in registers after the first time.",
        read_for_each_step=(READ_TWICE, "name not in made"),
        read_for_each_step__of_one_step=("dict.fromkeys(inputs)", "inputs", READ_TWICE, "name not in made")),
    *edits("Nothing was counted as written. Add the size of each result in `kept`.",
        nothing_written=("output in kept", "False")),
    *edits("Nothing was counted as read.", nothing_read=(READ_TWICE, "False")),
)  # fmt: skip
WEIGHT = "+ hidden * item_bytes"
KV_HEADS = "A token has query_heads heads of Q and key_heads heads of K. Both are turned, and V is not."
SHARED = (
    *edits("The layer adds and normalises twice: before attention and before the feed-forward part.",
        one_norm=("norms = 2 *", "norms =")),
    *edits("The norms' weights are missing: `hidden` numbers each, once for each norm.", weight_forgotten=(WEIGHT, "")),
    *edits("The norms' weight was counted for every token. It is one vector of `hidden` numbers.",
        weight_for_each_token=(WEIGHT, "+ tokens * hidden * item_bytes")),
    *edits(KV_HEADS, keys_not_turned=("(query_heads + key_heads)", "query_heads"),
        keys_not_turned__all_alike=("(query_heads + key_heads)", "2 * query_heads"),
        keys_not_turned__values_too=("(query_heads + key_heads)", "(query_heads + 2 * key_heads)"),
        keys_not_turned__heads_forgotten=("(query_heads + key_heads)", "2")),
    *edits("The tables of cosines and sines were counted for every head. A token's heads share theirs.",
        table_for_each_head=("table = tokens * head_dim", "table = tokens * (query_heads + key_heads) * head_dim"),
        table_for_each_head__of_q=("table = tokens * head_dim", "table = tokens * query_heads * head_dim"),
        table_for_each_head__of_k=("table = tokens * head_dim", "table = tokens * key_heads * head_dim")),
    *edits("The tables of cosines and sines were counted for one token. Each token has a row of its own.",
        table_of_one_token=("table = tokens * head_dim", "table = head_dim")),
)  # fmt: skip
CAST = "0 if item_bytes == 4 else item_bytes + 4"
EAGER = (
    *SHARED,
    *edits("In 16 bits the two casts are missing, or too few bytes were counted for them. One reads 2 bytes a number "
        "and writes 4, the other reads 4 and writes 2.",
        casts_forgotten=("2 * cast + 8", "8"), casts_forgotten__one=("2 * cast + 8", "cast + 8"),
        casts_forgotten__narrow=("else item_bytes + 4", "else 2 * item_bytes"),
        casts_forgotten__written=("else item_bytes + 4", "else 4")),
    *edits("In 32 bits the casts were counted too. A tensor that is float32 already is not copied.",
        casts_of_float32=(CAST, "item_bytes + 4"), casts_of_float32__as_16=(CAST, "6"),
        casts_of_float32__one=("2 * cast + 8", "(2 * cast or 8) + 8")),
    *edits("The casts were counted in 32 bits, and not in 16. A tensor that is float32 already is not copied.",
        casts_exchanged=(CAST, "item_bytes + 4 if item_bytes == 4 else 0")),
    *edits("The addition and the product with the weight were counted in float32. They are in the layer's own dtype.",
        all_wide=("summing = 3 * item_bytes", "summing = 12", " + 2 * item_bytes", " + 8")),
    *edits("The tensors between the casts were counted in the layer's own dtype. They are float32: 4 bytes a number.",
        all_narrow=("+ 8 + 4 + 8 +", "+ 5 * item_bytes +",),
        all_narrow__casts_too=("+ 8 + 4 + 8 +", "+ 5 * item_bytes +", "item_bytes + 4", "2 * item_bytes")),
    *edits("The addition reads two tensors and writes one.",
        addition_is_free=("summing = 3 * item_bytes", "summing = 0"),
        addition_is_free__two=("summing = 3 * item_bytes", "summing = 2 * item_bytes")),
    *edits("Of the float32 steps 4 bytes a number are missing. The square reads 4 and writes 4, the mean reads 4, and "
        "the product reads 4 and writes 4.", float32_short=("+ 8 + 4 + 8 +", "+ 8 + 8 +")),
    *edits("The product with the weight is missing: it reads a number and writes one.",
        weighting_forgotten=(" + 2 * item_bytes", "")),
    *edits("A turned number moves ten times: negating takes 1, joining 2, each product 2, and the sum 3.",
        **{f"rotation_short__{times}": ("10 * turned", f"{times} * turned") for times in (7, 5, 6, 8, 9, 11, 12)}),
    *edits("Q and K each read the cosines and the sines: four tables.",
        tables_read_once=("4 * table", "2 * table"), tables_read_once__none=("+ 4 * table", "")),
    *edits("SwiGLU has two operations: SiLU reads and writes a tensor, the product reads two and writes one.",
        swiglu_short=("5 * tokens", "3 * tokens"), swiglu_short__4=("5 * tokens", "4 * tokens")),
)  # fmt: skip
FUSED = (
    *SHARED,
    *edits("The sum was not counted as written. It is the next residual, so both results are.",
        sum_not_written=("4 * tokens * hidden", "3 * tokens * hidden")),
    *edits("The sum was counted as read again. It is in registers.",
        sum_read_again=("4 * tokens * hidden", "5 * tokens * hidden")),
    *edits("Q and K are read once and written once.", rotation_long=("2 * turned", "3 * turned"),
        rotation_long__read=("2 * turned", "turned"), rotation_long__eager=("2 * turned", "10 * turned")),
    *edits("Q and K were turned by one kernel, and it reads a token's cosines and sines once.",
        tables_twice=("2 * table", "4 * table"), tables_twice__none=("+ 2 * table", ""),
        tables_twice__one=("2 * table", "1 * table")),
    *edits("SwiGLU reads two tensors and writes one.", swiglu_long=("3 * tokens", "5 * tokens"),
        swiglu_long__2=("3 * tokens", "2 * tokens")),
)  # fmt: skip

EXERCISE = Exercise(
    id="13.1",
    title="The byte ledger",
    entries=("kernel_bytes", "eager_glue_bytes", "fused_glue_bytes"),
    cases=ledger_cases,
    oracle={"kernel_bytes": moved, "eager_glue_bytes": one_by_one, "fused_glue_bytes": in_four_kernels},
    contracts=(_glue("eager_glue_bytes"), _glue("fused_glue_bytes")),
    models=(
        model_of(moved, KERNEL, entry="kernel_bytes"),
        model_of(one_by_one, EAGER, entry="eager_glue_bytes"),
        model_of(in_four_kernels, FUSED, entry="fused_glue_bytes"),
    ),
    hints=(
        "kernel_bytes: go through the steps in order, and keep two sets: the names that were read, and those that were "
        "made. An input counts if it is in neither.",
        "Count one step's result if its name is in `kept`, whoever reads it inside the kernel.",
        "eager_glue_bytes: in 16 bits, one number of the hidden state moves 6 bytes for the addition, then 6 (cast), 8 "
        "(square), 4 (mean), 8 (product), 6 (cast) and 4 (weight).",
        "One number of Q or K moves 10 · item_bytes: negating a half 1, joining 2, the two products 4, the sum 3. Each "
        "product reads a table of tokens · head_dim too. SwiGLU moves 5 · item_bytes a number.",
        "fused_glue_bytes: 4 tensors and a weight twice, Q and K in and out with two tables, and 3 tensors of SwiGLU.",
    ),
)  # fmt: skip
