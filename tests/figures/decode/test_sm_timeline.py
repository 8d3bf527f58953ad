"""The timeline follows its stated model, draws a bar for every program, and says in numbers what it shows."""

import pytest

from course_lib.figures.decode.sm_timeline import H200, Schedule, draw_one, draw_schedules, sm_timeline

LLAMA = {"batch": 1, "query_heads": 32, "key_heads": 8, "context": 131072, "head_dim": 128, "item_bytes": 2}


def schedule(splits, **changes):
    return Schedule(splits, **{**LLAMA, **H200, **changes})


def test_one_wave_reads_all_bytes_at_the_chips_bandwidth():
    one = schedule(16)
    assert one.waves == [128] and one.busy == 128 / 132
    assert one.wave_seconds[0] == pytest.approx(2e-6 + 2 * 8 * 131072 * 128 * 2 / 4.37e12)


def test_a_few_programs_draw_no_more_than_their_own_rate():
    assert schedule(1).seconds == pytest.approx(2e-6 + 2 * 131072 * 128 * 2 / 40e9)


def test_one_split_too_many_costs_a_second_wave_of_its_own():
    assert schedule(17).waves == [132, 4]
    assert schedule(17).seconds > 1.5 * schedule(16).seconds


def test_the_combine_is_free_without_a_split_and_grows_with_the_splits():
    assert schedule(1).combine_seconds == 0
    assert schedule(16).combine_seconds == pytest.approx(3e-6 + 2 * 16 * 32 * 129 * 4 / 4.37e12)
    assert schedule(64).combine_seconds > schedule(16).combine_seconds


@pytest.mark.parametrize("splits", [1, 16, 17, 40])
def test_every_program_has_one_bar_and_no_slot_two_at_a_time(splits):
    bars = schedule(splits).bars()
    assert len(bars) == 8 * splits and len({(slot, start) for slot, start, _, _ in bars}) == 8 * splits
    assert all(sum(bar[3] == head for bar in bars) == splits for head in range(8))


def test_each_panel_says_programs_waves_and_time():
    figure = draw_schedules([schedule(1), schedule(17)])
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == [
        "8 programs, 1 wave, 6% of the slots busy\n1.68 ms",
        "136 programs, 2 waves, 52% of the slots busy\n225 µs",
    ]


def test_the_chosen_number_of_splits_is_marked_among_all():
    times = [schedule(splits).seconds for splits in range(1, 65)]
    curve, mark = draw_one(schedule(17), times).axes[1].lines
    assert len(curve.get_xdata()) == 64
    assert list(mark.get_xdata()) == [17] and list(mark.get_ydata()) == pytest.approx([1e6 * times[16]])


def test_the_slider_changes_the_picture():
    slider, image = sm_timeline(**{**LLAMA, "context": 1000}, show=(1, 15)).widget().children
    before = image.value
    slider.value = 9
    assert image.value != before and slider.max == 1000 // 64


@pytest.mark.parametrize(
    "wrong, name", [({"context": 0}, "context"), ({"query_heads": 12}, "query_heads"), ({"show": (1, 300)}, "show")]
)
def test_what_cannot_be_drawn_is_named(wrong, name):
    with pytest.raises(ValueError, match=f"^{name} is"):
        sm_timeline(**{**LLAMA, **wrong})
