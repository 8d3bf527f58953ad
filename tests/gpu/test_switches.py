"""The finale's switches on compiled kernels: in all layers, timed, and each kind of work by its kernels."""

from course_lib.serving.switches import SWITCHES, subject, switch_on
from course_lib.serving.token_time import KINDS, before_and_after
from tests.serving.test_switches import answers


def test_the_small_model_is_taken_over_on_a_gpu(capsys):
    asked = subject(False)
    rows = switch_on(asked, answers())
    assert len(rows) == 1 + len(SWITCHES) and "off again" not in capsys.readouterr().out
    assert asked.layers == asked.model.config.layers
    # Of nearly equally likely bytes another sum's order may choose the other: a few at the beginning are far apart.
    assert all(row.tokens[:4] == rows[0].tokens[:4] for row in rows)
    assert rows[-1].runs < len(rows[-1].tokens)
    for name, times in before_and_after(asked, rows).items():
        assert all(times[kind] > 0 for kind in KINDS), f"{name}: no kernel was seen in one of {times}"
        assert times["waiting"] >= 0
