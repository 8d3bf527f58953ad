"""What `bench ideas` measures: each column is attention, and no two are the same."""

import pytest
import torch

from course_lib.bench import ideas
from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.common.tiles import Tiles

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter")
TILES = Tiles(32, 32, warps=4, stages=1)


def test_the_rows_are_cells_of_the_forward_table():
    from course_lib.bench.attention import ROWS

    assert len(ideas.ROWS) == 12 and all(row in ROWS for row in ideas.ROWS)


@pytest.mark.parametrize("name", {**ideas.PLAIN, **ideas.TMA})
def test_every_column_is_attention(name, monkeypatch):
    """By the launches themselves; the copy engine's kernel runs in the interpreter, too."""
    monkeypatch.setattr(ideas, "tiles_to_try", lambda query: (TILES,))
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 70, 32, generator=draw) for _ in range(3)]
    run = ideas.plain if name in ideas.PLAIN else ideas.flash_attention_tma
    launch = ideas.with_best_tiles(run, inputs, True, {**ideas.PLAIN, **ideas.TMA}[name])
    torch.testing.assert_close(launch(), attention_reference(*inputs, causal=True), rtol=1e-3, atol=1e-3)


def test_what_is_missing_leaves_a_dash(capsys):
    table = {"D64 full 1024": {"plain": {"tflops": 200.0}, "lazy": {"tflops": 210.0}, "all": {"missing": "why"}}}
    ideas.print_part(table, list(ideas.PLAIN))
    assert "200" in (out := capsys.readouterr().out) and "210 (+5.0 %)" in out and out.count("–") == 3
