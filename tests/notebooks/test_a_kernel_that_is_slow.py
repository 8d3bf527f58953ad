"""Chapter 15's slow kernel is right, has the figures that the text says, and loses them by the lines that it names."""

import importlib.util
import re
import textwrap

import pytest
import torch

from course_lib import builder, profile
from course_lib.hardware.meter.metered import metered

HEADER = """import torch
import triton
import triton.language as tl
"""
CHAPTER = builder.SOURCES / "15_profile_and_choose.py"
ENOUGH_REGISTERS = ("BLOCK=8192, num_warps=1", "BLOCK=1024, num_warps=4")
SIDE_BY_SIDE = (
    ("BLOCK=8192, num_warps=1", "BLOCK=128, num_warps=4"),
    ("[(x.shape[1],)]", "[(x.shape[1] // 8,)]"),
)


def named_lines():
    """The body of the kernel that the text shows behind the second question."""
    text = "\n".join(cell.text for cell in builder.read_cells(CHAPTER))
    (answer,) = re.findall(r"<details><summary>The second reason</summary>(.*?)</details>", text, re.DOTALL)
    return "\n".join(line for line in answer.splitlines() if line.startswith("    "))


def figures(tmp_path, *edits, body=""):
    """(times the least bytes, bytes spilled, warps that fit, sentence) of the copy, which is right in any case."""
    (text,) = (cell.text for cell in builder.read_cells(CHAPTER) if "def mended_variance(" in cell.text)
    if body:
        begin, end = text.index("    channel = tl.program_id"), text.index("\n\n\ndef mended_variance(")
        text = text[:begin] + textwrap.indent(textwrap.dedent(body), "    ") + text[end:]
    for before, after in edits:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path = tmp_path / "mended_variance.py"  # Triton reads a kernel's source from its file
    path.write_text(HEADER + text[: text.rindex("profile(")])
    specification = importlib.util.spec_from_file_location("mended_variance", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    x = torch.randn(10_000, 32, generator=torch.Generator().manual_seed(15))
    call = module.mended_variance, x, x.mean(0)
    card, traffic = profile(*call, arch=90, counters=False), metered(*call)
    (kernel,) = card.kernels
    assert (call[0](*call[1:]) - x.var(0, unbiased=False)).abs().max() < 1e-5
    assert traffic["mean_pointer"].loaded_bytes < 0.01 * traffic.loaded_bytes
    return card.moved_bytes / card.least_bytes, kernel.view.spill_bytes, kernel.occupancy.warps, card.look_at


def test_it_is_right_spills_and_moves_eight_times_the_bytes(tmp_path):
    times, spilled, warps, sentence = figures(tmp_path)
    assert times == pytest.approx(8, abs=0.01) and spilled > 0 and warps == 8 and "spills" in sentence


def test_a_smaller_block_with_more_warps_ends_the_spills_alone(tmp_path):
    times, spilled, warps, sentence = figures(tmp_path, ENOUGH_REGISTERS)
    assert times == pytest.approx(8, abs=0.02) and spilled == 0 and warps == 64 and "sectors" in sentence


def test_the_lines_of_the_text_end_both(tmp_path):
    times, spilled, _, sentence = figures(tmp_path, *SIDE_BY_SIDE, body=named_lines())
    assert times == pytest.approx(1, abs=0.02) and spilled == 0 and "4 programs" in sentence
