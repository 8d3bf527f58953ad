"""What a CUDA graph is asked for without a GPU; with one, tests/gpu/test_decode.py records and replays."""

import pytest
import torch

from course_lib.hardware.graphs import recorded


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_called_and_the_reason_is_said():
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        recorded(lambda: pytest.fail("called"))
