"""Wrong answers to exercise 9.8, and unusual right ones."""

from course_lib.checker.specification.catalog import solution_source
from tests.submissions.edits import changed

RESCALED = "        accumulator = accumulator * gl.expand_dims(rescale, 1)\n        operand ="


ASKED = "        accumulator = ask_for_output(operand, accumulator, tiles, block - 1)\n"


NEW_OPERAND = "        operand = as_operand(weights, query.dtype)\n    accumulator = ask"


# The maximum, the sum and the weights are made before the product is asked for: right, but nothing overlaps.
SERIAL = """        scores = ask_for_scores(query, tiles, barriers, block, GROUP, TURNS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        accumulator = ask_for_output(operand, accumulator, tiles, block - 1)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(value_free.index((block - 1) % STAGES), count=1)
        weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)
"""


def in_the_overlapped_loop(new):
    """The course's answer with another body for the loop, up to where the accumulator is rescaled."""
    source = solution_source("9.8")
    head, tail = source.split("    for block in range(1, blocks):\n        stage = block % STAGES\n")
    rest = tail[tail.index(RESCALED) :]
    return head + "    for block in range(1, blocks):\n        stage = block % STAGES\n" + new + rest


WRONG = {
    "accumulator_not_rescaled": changed("9.8", (RESCALED, "        operand =")),
    "rescaled_too_early": in_the_overlapped_loop(
        SERIAL.replace(
            "        accumulator = ask_for",
            "        later = gl.maximum(running_max, gl.max(scores, axis=1) * scale_log2)\n"
            "        accumulator = accumulator * gl.expand_dims(gl.exp2(running_max - later), 1)\n"
            "        accumulator = ask_for",
        )
        + "        rescale = gl.exp2(later - later)\n"
    ),
    "weights_of_the_wrong_block": in_the_overlapped_loop(
        SERIAL.replace(
            "        accumulator = ask_for_output(operand",
            "        ahead, _r, _m, _s = weigh(scores, running_max, running_sum, scale_log2)\n"
            "        accumulator = ask_for_output(as_operand(ahead, query.dtype)",
        )
    ),
    "first_weights_kept": changed("9.8", (NEW_OPERAND, "    accumulator = ask")),
    "output_of_the_last_block_only": in_the_overlapped_loop(
        SERIAL.replace(ASKED, "").replace("        accumulator = warpgroup_mma_wait(0, deps=[accumulator])\n", "")
    ),
}


UNUSUAL = {
    "keys freed after the softmax": changed(
        "9.8",
        (
            "        mbarrier.arrive(key_free.index(stage), count=1)\n        weights, rescale",
            "        weights, rescale",
        ),
        (
            "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
            "        mbarrier.arrive(key_free.index(stage), count=1)\n"
            "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
        ),
    ),
    "the turn passed on after the scores": changed(
        "9.8",
        (
            "        if TURNS:\n            mbarrier.arrive(turns.index(1 - GROUP), count=1)\n"
            "        scores = warpgroup_mma_wait(1, deps=[scores])",
            "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
            "        if TURNS:\n            mbarrier.arrive(turns.index(1 - GROUP), count=1)\n       ",
        ),
    ),
    "the operand made before the wait": changed(
        "9.8",
        ("        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here",
         "        following = as_operand(weights, query.dtype)\n"
         "        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here"),
        (NEW_OPERAND, "        operand = following\n    accumulator = ask"),
    ),
}
