"""The picture of a token's time: its bars add up, and none vanishes beside a longer one."""

import pytest

from course_lib.figures.serving.token_time import draw_token_time

BEFORE = {"products": 3e-3, "attention": 1e-3, "waiting": 4e-3}


def bars(figure):
    return [(patch.get_y(), patch.get_width()) for patch in figure.axes[0].patches]


@pytest.mark.parametrize(("factor", "longest", "unit"), [(0.5, 8.0, "ms"), (20.0, 100.0, "%")])
def test_bars_are_times_or_shares_where_one_would_vanish(factor, longest, unit):
    figure = draw_token_time({"before": BEFORE, "after": {kind: factor * time for kind, time in BEFORE.items()}})
    rows = sorted({y for y, _ in bars(figure)})
    totals = [sum(width for y, width in bars(figure) if y == row) for row in rows]
    assert totals[0] == pytest.approx(longest) and totals[1] == pytest.approx(longest * (factor if unit == "ms" else 1))
    assert figure.axes[0].get_xlabel().startswith(unit)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "before\n8.00 ms a token"
    assert figure._repr_png_()[0][:4] == b"\x89PNG"
