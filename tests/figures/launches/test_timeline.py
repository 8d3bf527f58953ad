"""When launches and kernels begin, in one stream and in several, and that the pictures draw."""

from course_lib.figures.launches.timeline import Work, draw_layer, draw_streams, draw_timelines, spans, stream_spans


def test_a_kernel_begins_when_its_launch_and_the_kernel_before_it_have_ended():
    launches, kernels, waits = spans([8, 8, 8], [3, 20, 3])
    assert launches == [(0, 8), (8, 8), (16, 8)] and kernels == [(8, 3), (16, 20), (36, 3)] and waits == []


def test_a_host_that_waits_launches_later():
    launches, kernels, waits = spans([8, 8], [20, 3], waits=[0])
    assert waits == [(8, 20)] and launches[1] == (28, 8) and kernels[1] == (36, 3)


def test_one_stream_is_what_spans_says():
    works = [Work("a", "s", 8, 3), Work("b", "s", 2, 20), Work("c", "s", 5, 1)]
    assert list(stream_spans(works)) == [list(found) for found in spans([8, 2, 5], [3, 20, 1])[:2]]


def test_streams_run_at_the_same_time_and_an_event_makes_one_wait():
    fill, replay = Work("fill", "copies", 4, 20), Work("replay", "main", 8, 40)
    assert stream_spans([fill, replay])[1] == [(4, 20), (12, 40)]
    assert stream_spans([fill, replay._replace(after=(0,))])[1] == [(4, 20), (24, 40)]


def test_an_event_that_has_happened_costs_nothing():
    works = [Work("fill", "copies", 1, 2), Work("long", "main", 1, 30), Work("replay", "main", 1, 5, after=(0,))]
    assert stream_spans(works)[1][2] == (32, 5)


def test_the_pictures_draw():
    assert draw_timelines([("one", [8.0] * 3, [3.0] * 3, (1,))]).axes
    figure = draw_streams(
        [("one", [Work("a", "s", 1, 5)]), ("two", [Work("a", "s", 1, 5), Work("b", "t", 1, 5, (0,))])]
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["host", "s", "host", "s", "t"]


def test_a_layer_has_a_row_for_each_kernel_and_says_when_the_next_begins():
    forms = [("alone", 8.0, [("a", 0.0, 4.0), ("b", 5.0, 3.0)]), ("early", 6.0, [("a", 0.0, 5.0), ("b", 2.0, 7.0)])]
    (axes,) = draw_layer(forms).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "a", "b"]
    bars = [path.get_extents().bounds for bar in axes.collections for path in bar.get_paths()]
    assert [(begin, length) for begin, _, length, _ in bars] == [(0, 4), (5, 3), (0, 5), (2, 7)]
    assert [text.get_text() for text in axes.texts if "next" in text.get_text()] == [
        "next layer at 8 µs", "next layer at 6 µs",
    ]  # fmt: skip
