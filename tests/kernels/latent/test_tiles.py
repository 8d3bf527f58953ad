"""How latent decode is cut: by what the grid fills, no score computed twice, two tiles of the cache in flight."""

import re

import pytest

from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.latent.kernel import compile_cases
from course_lib.kernels.latent.tiles import latent_splits


@pytest.mark.parametrize("programs, longest, splits", [(2, 32768, 66), (128, 4096, 1), (256, 4096, 1), (32, 8192, 4)])
def test_splits_fill_the_multiprocessors_and_count_all_programs(programs, longest, splits):
    """Counted from the length alone, 64 sequences of 128 heads would be split although their programs fill the chip."""
    assert latent_splits(programs, longest, 132) == splits


def test_a_short_sequence_is_not_split_into_crumbs():
    assert latent_splits(1, 1, 132) == latent_splits(1, 64, 132) == latent_splits(1, 0, 132) == 1
    assert latent_splits(1, 1024, 132) <= 16


def test_on_hopper_no_score_is_computed_twice_and_two_tiles_of_the_cache_fit():
    """Eight warps over 64 rows computed all scores twice, 72 instructions where 36 do, and needed three tiles."""
    of = [case for case in compile_cases() if case.archs == (90,) and " 512 + 64, 128 rows, page" in case.label]
    assert len(of) == 3
    for view in compile_many([request for case in of for request in case.requests()]):
        shapes = re.findall(r"wgmma\.mma_async\S*?m64n(\d+)k16", view.ptx)
        assert shapes.count("32") == 576 // 16 and shapes.count("256") == 64 // 16, shapes
        queries, tile = 64 * 576 * 2, 64 * 576 * 2
        assert queries + 2 * tile <= view.shared_bytes < queries + 3 * tile
