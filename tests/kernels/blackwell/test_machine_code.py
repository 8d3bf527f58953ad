"""What must stand in the machine code of the Blackwell kernel, and what its docstring says of it."""

import re

import pytest

from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.blackwell.flash import OTHER_REGISTERS, SOFTMAX_REGISTERS, compile_cases


def instructions(sass: str) -> list[str]:
    """The lines of a listing without addresses and conditions, labels among them."""
    bare = re.sub(r"/\*.*?\*/", "", sass)
    lines = (re.sub(r"^@!?U?P\w+\s+", "", line.strip()) for line in bare.splitlines())
    return [line for line in lines if line]


def softmax_loops(sass: str) -> list[list[str]]:
    """The loops over blocks of keys of both softmax groups: the shortest around each load of a row of scores."""
    lines = instructions(sass)
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    loops: dict[int, list[str]] = {}
    for number, line in enumerate(lines):
        target = re.match(r"BRA\S* .*`\((\.L_x_\d+)\)", line)
        if target and labels[target[1]] < number:
            loop = lines[labels[target[1]] : number]
            if count(loop, "LDTM.x64") == 2:
                place = labels[target[1]] + next(i for i, line in enumerate(loop) if line.startswith("LDTM.x64"))
                loops[place] = min(loops.get(place, loop), loop, key=len)
    return [[line for line in loop if not line.endswith(":")] for loop in loops.values()]


def count(loop: list[str], *names: str) -> int:
    return sum(line.startswith(names) for line in loop)


CASES = compile_cases()


@pytest.mark.slow
def test_the_loops_take_few_exponentials_and_pairs_of_multiply_adds_and_spill_nothing():
    for case, view in zip(CASES, compile_many([{**case.requests()[0], "want_sass": True} for case in CASES])):
        loops = softmax_loops(view.sass)
        assert len(loops) == 4, case.label  # each group has one with a mask and one without
        assert sum(count(loop, "FSEL") < 8 and len(loop) < 530 for loop in loops) == 2, case.label
        for loop in loops:
            assert count(loop, "STTM") == 1 and count(loop, "LDL", "STL") == 0, case.label
            # Weights, 28 of every 32, and the row's factor. Pairs: the scores' scaling, and each step of a polynomial.
            assert count(loop, "MUFU.EX2") == 128 * 28 // 32 + 1
            assert 64 + 3 * 128 * 4 // 32 // 2 <= count(loop, "FFMA2") < 100
            assert count(loop, "FFMA ") < 8 and count(loop, "F2FP") == 64
        moved = re.findall(r"USETMAXREG\.\w+(?:\.\w+)* +(?:U?P\d+, *)?(?:0x)?(\w+)", view.sass)
        softmax, others = SOFTMAX_REGISTERS.value, OTHER_REGISTERS.value
        assert {softmax, others, 512 - 2 * softmax - others} <= {int(number, 16) for number in moved}, case.label


def test_every_product_is_the_fifth_generations_and_the_weights_come_from_tensor_memory():
    """An instruction takes 16 terms of each sum. Four products start scores, two before the loop; two start outputs."""
    for case, view in zip(CASES, compile_many([case.requests()[0] for case in CASES])):
        head_dim = int(case.label.split()[1])
        assert view.instructions["tcgen05"] == 4 * head_dim // 16 + 2 * 128 // 16, case.label
        from_tensor_memory = re.findall(r"tcgen05\.mma\.\S+ \[[^]]*\], \[[^]]*\]", view.ptx)
        assert len(from_tensor_memory) == 2 * 128 // 16, case.label
        assert "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32" in view.ptx
