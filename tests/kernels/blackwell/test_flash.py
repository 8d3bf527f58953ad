"""The Blackwell kernel without a Blackwell: its own source played on the CPU, its meaning, and what it refuses."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from course_lib.hardware.tensor_memory_model import play_tensor_memory
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.blackwell.flash import (
    KEY_ROWS,
    SETTINGS,
    STAGES,
    THRESHOLD,
    flash_attention_blackwell,
    flash_attention_blackwell_kernel,
)
from course_lib.kernels.blackwell.limits import blackwell_refusal
from course_lib.kernels.blackwell.meaning import lazy_attention_reference
from course_lib.kernels.blackwell.parts import TILE_ROWS
from course_lib.kernels.blackwell.products import start_products
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.gluon.names import gl, gluon, mbarrier
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.limits import input_refusal
from tests.kernels.blackwell.played_gluon import (
    Barriers,
    Deadlock,
    Descriptor,
    Pointer,
    play_program,
    played,
)

POLYNOMIAL_ERROR = 8.6e-5  # relative, of some of the weights: common/exponentials.py


def played_attention(query, key, value, *, causal=False, seed=0, threshold=THRESHOLD, deaf_to=""):
    """`flash_attention_blackwell` as the launcher would start it, on the CPU: (output, log-sum-exp)."""
    batch, query_heads, query_length, head_dim = query.shape
    output = torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:3], float("nan"))
    rows = TILE_ROWS.value
    for program in range(-(-query_length // (2 * rows)) * batch * query_heads):
        play_program(
            flash_attention_blackwell_kernel, program, seed, deaf_to,
            queries=Descriptor(query, rows, head_dim), keys=Descriptor(key, KEY_ROWS, head_dim),
            values=Descriptor(value, KEY_ROWS, head_dim), outputs=Descriptor(output, rows, head_dim),
            lse_pointer=Pointer(lse), batch=batch, query_heads=query_heads,
            heads_per_key_head=query_heads // key.shape[1], query_length=query_length, key_length=key.shape[2],
            heads_at_once=3, keys_after=0 if causal else None, scale_log2=scale_in_log2(None, head_dim),
            **SETTINGS | {"STAGES": STAGES[head_dim], "THRESHOLD": threshold},
        )  # fmt: skip
    return output, lse


def inputs(*lengths, head_dim=64, dtype=torch.float16, batch=1, heads=1, key_heads=1):
    generator = torch.Generator().manual_seed(0)
    query_length, key_length = lengths
    shapes = [(heads, query_length), (key_heads, key_length), (key_heads, key_length)]
    return [torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes]


def climbing(step, blocks=4, rows=256):
    """Queries and keys whose scores grow by `step`, in units of log 2, from each block taken to the next."""
    query, key, value = inputs(rows, blocks * KEY_ROWS)
    query[..., 0], key[..., 0] = 1.0, 0.0
    taken_as = torch.arange(blocks).flip(0).repeat_interleave(KEY_ROWS)  # the last block is taken first
    key[..., 0] = (taken_as * step / scale_in_log2(None, 64)).half()
    key[..., 1:] = 0.0
    return query, key, value


def assert_right(query, key, value, **options):
    output, lse = played_attention(query, key, value, **options)
    options = {"causal": options.get("causal", False)}
    exact, exact_lse = attention_reference(query.double(), key.double(), value.double(), return_lse=True, **options)
    # A weight is rounded to the inputs' precision, and so is the output. A float16 below 2^-14 is rounded to a multiple
    # of 2^-24, and a row's weights add up to 1 at least.
    unit = torch.finfo(query.dtype).eps / 2
    of_magnitudes = attention_reference(query.double(), key.double(), value.double().abs(), **options)
    allowed = (2 * unit + POLYNOMIAL_ERROR) * of_magnitudes + key.shape[2] * 2**-24 * value.abs().max()
    assert ((output.double() - exact).abs() <= allowed).all()
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=POLYNOMIAL_ERROR)


# ------------------------------------------------------------------------------------------------ the source, played


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(256, 256), (1, 1), (130, 700), (300, 129), (512, 1000)], ids=str)
def test_its_source_computes_attention_on_ragged_lengths_and_grouped_heads(lengths, causal, head_dim, dtype):
    assert_right(*inputs(*lengths, head_dim=head_dim, dtype=dtype, batch=2, heads=2, key_heads=1), causal=causal)


def product_warp(blocks):
    """The steps of the kernel's product warp, in the words of `play_tensor_memory`."""
    steps = []

    def start_output(buffers, columns, barriers, step, blocks, tile):
        steps.extend([("wait", "weights", tile, step), ("wait", "corrected", tile, step), ("output", tile, step)])

    others = {
        "gl": SimpleNamespace(static_range=range), "mbarrier": SimpleNamespace(wait=lambda barrier, phase: None),
        "start_scores": lambda buffers, columns, barriers, step, tile: steps.append(("scores", tile, step)),
        "start_output": start_output,
    }  # fmt: skip
    played(start_products, others)(None, None, SimpleNamespace(query_ready=Barriers([None, None])), blocks)
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_and_the_order_of_products_are_those_that_the_model_of_tensor_memory_finds_right(seed):
    plan = {"S0": (0, 128), "P0": (0, 64), "S1": (128, 128), "P1": (128, 64), "O0": (256, 128), "O1": (384, 128)}
    ticks = [[random.Random(seed + place).randint(1, 9) for _ in range(7)] for place in range(5)]
    products, softmax, correction = list(zip(*ticks[:2])), list(zip(*ticks[2:4])), ticks[4]
    result = play_tensor_memory({"product_warp": product_warp}, plan, 6, products, softmax, correction)
    assert result["ending"] == "finished", result
    starts = [f"{step[0][0].upper()}{step[1]} of {step[2]}" for step in product_warp(2) if step[0] != "wait"]
    assert starts == "S0 of 0|S1 of 0|O0 of 0|S0 of 1|O1 of 0|S1 of 1|O0 of 1|O1 of 1".split("|")


def test_rows_that_see_no_key_are_zeros():
    query, key, value = inputs(400, 100)
    output, lse = played_attention(query, key, value, causal=True)
    assert (output[:, :, :300] == 0).all() and (lse[:, :, :300] == -math.inf).all()
    assert (output[:, :, 300:] != 0).any(3).all() and lse[:, :, 300:].isfinite().all()


@pytest.mark.parametrize("step", [0.0, 2.5, 7.9, 8.1, 40.0])
def test_references_that_lag_behind_or_move_in_every_block_change_nothing(step):
    assert_right(*climbing(step))


def test_the_order_of_events_decides_not_one_bit():
    query, key, value = inputs(300, 700)
    first = played_attention(6 * query, key, value, causal=True)
    for seed in range(1, 20):
        again = played_attention(6 * query, key, value, causal=True, seed=seed)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), seed


@pytest.mark.parametrize(
    "barriers",
    ["query_ready", "key_ready", "key_free", "value_ready", "value_free", "scores_ready", "factors_ready",
     "weights_ready", "corrected", "output_ready", "totals_ready"],
)  # fmt: skip
def test_without_any_one_kind_of_barriers_some_order_of_events_goes_wrong(barriers):
    query, key, value = climbing(9.0, blocks=8)
    right = played_attention(query, key, value)
    for seed in range(100):
        try:
            result = played_attention(query, key, value, seed=seed, deaf_to=barriers)
        except AssertionError:  # a barrier told too often, or a deadlock
            return
        if not torch.equal(result[0], right[0]):
            return
    pytest.fail(f"100 orders of events went well though nobody waited for {barriers}.")


@gluon.jit
def wait_in_vain(barrier):
    mbarrier.wait(barrier, 0)


@gluon.jit
def stuck_kernel():
    barriers = new_barriers(1, 1)
    gl.warp_specialize([(wait_in_vain, (barriers.index(0),)), (wait_in_vain, (barriers.index(0),))], [4], [24])


def test_a_deadlock_is_told_with_who_waits_for_what():
    with pytest.raises(Deadlock, match="wait_in_vain0 waits for a barrier, phase 0; wait_in_vain1 waits for a barrier"):
        play_program(stuck_kernel, 0, seed=0)


# ------------------------------------------------------------------------------------------------------- its meaning


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 8.0])
def test_a_reference_that_lags_behind_is_attention_all_the_same(threshold, causal):
    query, key, value = (tensor[0, 0].double() for tensor in inputs(200, 700))
    query *= 5
    output, lse, rescaled = lazy_attention_reference(query, key, value, causal=causal, threshold=threshold)
    exact, exact_lse = attention_reference(
        *(t[None, None] for t in (query, key, value)), causal=causal, return_lse=True
    )
    torch.testing.assert_close(output, exact[0, 0])
    torch.testing.assert_close(lse, exact_lse[0, 0].double())
    assert rescaled.any() or threshold == 8.0


@pytest.mark.parametrize(("step", "moves"), [(7.9, 1), (8.1, 3), (3.9, 1), (2.5, 0)])
def test_a_reference_moves_only_when_it_is_exceeded_by_more_than_the_threshold(step, moves):
    """Scores that climb by 7.9 in each of four blocks exceed it in the third; by 2.5, never: 7.5 in the fourth."""
    query, key, value = (tensor[0, 0] for tensor in climbing(step))
    _, _, rescaled = lazy_attention_reference(query, key, value)
    assert (rescaled == moves).all()


def test_the_source_has_the_references_of_its_meaning():
    """The output tells nothing of them; but float16 lacks 2^16, and a threshold that allows such a weight shows."""
    query, key, value = climbing(15.9, blocks=2)
    assert played_attention(query, key, value, threshold=16.0)[0].isfinite().all()
    query, key, value = climbing(16.1, blocks=2)
    assert played_attention(query, key, value, threshold=16.0)[0].isfinite().all()
    assert not played_attention(query, key, value, threshold=17.0)[0].isfinite().all()


# ------------------------------------------------------------------------------------------------------ what it refuses


def test_the_launcher_refuses_where_there_is_no_blackwell():
    query, key, value = inputs(16, 16)
    with pytest.raises(RuntimeError, match="flash_attention_blackwell: .* flash_attention takes these inputs"):
        flash_attention_blackwell(query, key, value)
    with pytest.raises(ValueError, match="head"):
        flash_attention_blackwell(query[..., :8], key, value)


def test_other_inputs_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("course_lib.kernels.blackwell.limits.machine_refusal", lambda *asked: None)
    assert blackwell_refusal(*inputs(5, 7, head_dim=128)) is None
    wide = blackwell_refusal(*inputs(5, 7, head_dim=192))
    assert wide is not None and "head dimension 192" in wide.reason
    single = blackwell_refusal(*inputs(5, 7, dtype=torch.float32))
    assert single is not None and single == input_refusal(*inputs(5, 7, dtype=torch.float32), "Blackwell")
    assert "the Blackwell kernel takes torch.float16" in single.reason
