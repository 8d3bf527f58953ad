"""What `bench ranks_decode` compares before it measures, on two ranks that are threads."""

import pytest
import torch

from course_lib.bench import ranks_decode as bench
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages_reference
from course_lib.serving import packed
from tests.models.test_parallel import on_threads
from tests.serving.talkers import CONFIG, random_model
from tests.serving.test_captured import by_calling
from tests.serving.test_fast_step import in_pytorch


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    in_pytorch(monkeypatch)
    monkeypatch.setattr(packed, "rope_append_to_pages", lambda *given, **_: rope_append_to_pages_reference(*given[:7]))
    monkeypatch.setattr(bench, "in_turns", lambda steps: dict.fromkeys(steps, 1e-3))


def rows_of(ranks, model):
    return bench.measure_batch(ranks, model, 3, 32, 1e9, by_calling)


def test_a_row_has_what_is_to_be_expected_of_a_rank():
    model = random_model()
    [[row]] = on_threads(rows_of, 1, model)
    read = 4 * (CONFIG.parameters - CONFIG.vocabulary * CONFIG.width) + CONFIG.cache_bytes(3, 32, 4)
    assert (row["bytes"], row["difference"], row["each_all_reduce"]) == (read, 0.0, 0.0)
    assert row["predicted"] == pytest.approx(read / 1e9) and row["tokens_per_second"] == pytest.approx(3000)
    [[half], _] = on_threads(rows_of, 2, model)
    assert 0 < half["difference"] < 1e-4 and half["bytes"] < 0.7 * read
    assert half["predicted"] == pytest.approx(half["bytes"] / 1e9 + 1e-3), "all its all-reduces took a millisecond"


def test_other_logits_than_the_whole_model_s_are_no_figure():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(dim=-1).tolist()
    assert on_threads(bench.check, 1, logits, logits, best) == [0.0]
    for other, chosen in ((1.2 * logits, best), (logits, [best[0], logits[1].argmin().item()])):
        with pytest.raises(RuntimeError, match="is rounding"):
            on_threads(bench.check, 1, logits, other, chosen)
