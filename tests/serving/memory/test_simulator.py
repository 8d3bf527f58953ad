"""A replayed trace: every slot is accounted for, nobody starves, and small cases come out as counted by hand."""

import statistics

import pytest

from course_lib.serving.memory import CacheFull, ContiguousCache, PagedCache, Request, replay, sample_trace
from course_lib.serving.memory.simulator import STATES
from course_lib.serving.memory.trace import SHAREGPT_OUTPUT_MEAN, SHAREGPT_PROMPT_MEAN


def test_a_trace_is_the_same_for_the_same_seed_and_has_the_means_it_states():
    trace = sample_trace(4000, seed=3, arrivals_per_step=0.5, spread=0.5, context=10**6)
    assert trace == sample_trace(4000, seed=3, arrivals_per_step=0.5, spread=0.5, context=10**6)
    assert trace != sample_trace(4000, seed=4, arrivals_per_step=0.5, spread=0.5, context=10**6)
    assert statistics.mean(r.prompt_tokens for r in trace) == pytest.approx(SHAREGPT_PROMPT_MEAN, rel=0.05)
    assert statistics.mean(r.output_tokens for r in trace) == pytest.approx(SHAREGPT_OUTPUT_MEAN, rel=0.05)
    assert trace[-1].arrival == pytest.approx(4000 / 0.5, rel=0.1)


def test_no_request_is_longer_than_the_context():
    trace = sample_trace(2000, seed=0, arrivals_per_step=1, spread=2.0, context=512)
    assert max(r.final_tokens for r in trace) == 512 and min(r.output_tokens for r in trace) == 1


@pytest.mark.parametrize("wrong", [{"count": 0}, {"arrivals_per_step": -1}, {"spread": -0.1}, {"context": 1}])
def test_a_trace_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sample_trace(**{"count": 5, "seed": 0, "arrivals_per_step": 1.0} | wrong)


def test_a_contiguous_cache_by_hand():
    """10 slots, 6 reserved for each: one runs, 4 free slots help nobody until it ends."""
    trace = [Request(0, 0, prompt_tokens=2, output_tokens=2), Request(1, 0, prompt_tokens=3, output_tokens=1)]
    timeline = replay(trace, ContiguousCache(10, reserve=lambda request: 6))
    assert timeline.used == [3, 0, 0]
    assert timeline.later == [1, 0, 0] and timeline.never == [2, 0, 0]
    assert timeline.stranded == [4, 10, 0] and timeline.idle == [0, 0, 10]
    assert timeline.waiting == [1, 1, 0]


def test_a_paged_cache_by_hand():
    """Blocks of 2: both run at once, and only ends of blocks are not filled."""
    trace = [Request(0, 0, prompt_tokens=2, output_tokens=2), Request(1, 0, prompt_tokens=3, output_tokens=3)]
    timeline = replay(trace, PagedCache(10, block_size=2, headroom=0))
    assert timeline.running == [2, 1, 0]
    assert timeline.used == [3 + 4, 5, 0] and timeline.later == [1, 1, 0] and timeline.never == [0, 0, 0]


def test_the_sequence_admitted_last_is_preempted_and_finishes_later():
    trace = [Request(0, 0, prompt_tokens=2, output_tokens=4), Request(1, 0, prompt_tokens=2, output_tokens=4)]
    timeline = replay(trace, PagedCache(8, block_size=2, headroom=0))
    assert timeline.preemptions == 1 and timeline.running[0] == 2
    # Request 0 makes its four tokens in four steps; request 1 made two of its own before it had to go.
    assert timeline.running[:3] == [2, 2, 1] and timeline.steps == 3 + 1 + 2


@pytest.mark.parametrize(
    "cache",
    [
        lambda: ContiguousCache(4000, lambda request: 512),
        lambda: ContiguousCache(4000, lambda request: request.final_tokens),
        lambda: PagedCache(4000, 1),
        lambda: PagedCache(4000, 16),
        lambda: PagedCache(4000, 100, headroom=0),
    ],
    ids=["maximum", "exact", "pages-of-1", "pages-of-16", "pages-of-100-without-headroom"],
)
def test_every_slot_is_accounted_for_at_every_step_and_everyone_is_served(cache):
    trace = sample_trace(60, seed=1, arrivals_per_step=0.3, prompt_mean=60, output_mean=80, context=512)
    cache = cache()
    timeline = replay(trace, cache)
    for step in range(timeline.steps):
        states = [getattr(timeline, state)[step] for state in STATES]
        assert min(states) >= 0 and sum(states) == cache.slots == timeline.slots
    assert timeline.running[-1] == timeline.waiting[-1] == 0 and not timeline.used[-1]
    made = sum(request.output_tokens for request in trace)
    assert timeline.steps >= made / max(timeline.running)


def test_pages_waste_less_than_one_page_for_each_sequence():
    trace = sample_trace(120, seed=5, arrivals_per_step=0.5, context=1024)
    timeline = replay(trace, PagedCache(8000, 16))
    waste = [later + never for later, never in zip(timeline.later, timeline.never)]
    assert all(lost <= 15 * running for lost, running in zip(waste, timeline.running))
    assert timeline.shares()["used"] > 0.9
    assert replay(trace, ContiguousCache(8000, lambda request: 1024)).shares()["used"] < 0.5


def test_a_request_larger_than_the_cache_is_named():
    with pytest.raises(CacheFull, match="Request 7 does not fit into an empty cache"):
        replay([Request(7, 0, 50, 1)], PagedCache(32, 16))
    with pytest.raises(CacheFull, match="Request 7 outgrew the whole cache"):
        replay([Request(7, 0, 20, 50)], PagedCache(32, 16))


def test_shares_need_somebody_who_waits():
    with pytest.raises(ValueError, match="Nobody ever waited"):
        replay([Request(0, 0, 2, 2)], PagedCache(32, 16)).shares()
