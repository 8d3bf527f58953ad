"""Chapter 04's kernel with two mistakes goes wrong as the text says, and is right with the two lines that it names."""

import importlib.util
import re

import torch

from course_lib import builder

HEADER = """import math
import torch
from course_lib import default_device
import triton
import triton.language as tl
device = default_device()
"""
CHAPTER = builder.SOURCES / "04_triton_tiling.py"
BORROWED = ("value_pointer + sequence * key_stride", "value_pointer + sequence * value_stride")
NO_KEY_YET = (
    ("weights = tl.exp(scores - new_max)", "weights = tl.exp(scores - reference_max)"),
    ("rescale = tl.exp(running_max - new_max)", "rescale = tl.exp(running_max - reference_max)"),
    (
        "        weights = tl.exp(",
        '        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)\n        weights = tl.exp(',
    ),
)


def errors(tmp_path, *edits):
    """The largest error of each of the four programs, after these edits of the kernel's cell."""
    (text,) = (cell.text for cell in builder.read_cells(CHAPTER) if "def left_padded_kernel(" in cell.text)
    for before, after in edits:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path = tmp_path / "left_padded.py"  # Triton reads a kernel's source from its file
    path.write_text(HEADER + text)
    specification = importlib.util.spec_from_file_location("left_padded", path)
    module = importlib.util.module_from_spec(specification)
    torch.manual_seed(4)
    specification.loader.exec_module(module)
    return (module.left_padded(*module.padded)[0] - module.true_output).abs().amax(dim=1).tolist()


def test_the_first_program_is_right_the_second_wrong_and_the_others_nan(tmp_path):
    right, wrong, *others = errors(tmp_path)
    assert right < 1e-5 < 0.01 < wrong and all(number != number for number in others)


def test_each_line_mends_one_mistake_and_both_mend_the_kernel(tmp_path):
    assert [number != number for number in errors(tmp_path, BORROWED)] == [False, False, True, True]
    assert errors(tmp_path, BORROWED)[1] < 1e-5
    assert max(errors(tmp_path, *NO_KEY_YET)) > 0.01  # no NaN, for which this would be false
    assert max(errors(tmp_path, BORROWED, *NO_KEY_YET)) < 1e-5


def test_the_text_names_these_lines():
    (named,) = re.findall(r"<details><summary>What to write</summary>(.*?)</details>", CHAPTER.read_text(), re.DOTALL)
    assert BORROWED[1] in named and NO_KEY_YET[2][1].split("\n")[0].strip() in named
