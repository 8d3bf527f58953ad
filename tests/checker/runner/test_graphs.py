"""`torch.compile` in an answer: it compiles where a case says so, its graphs are counted, and elsewhere all is seen."""

import pytest

from course_lib.checker import Case, CompilesWith, Exercise, Forbids, Limits
from course_lib.checker.judge.decide import judge


def _cases(draw):
    for rows in (3, 17):
        yield Case(f"{rows} rows", (draw.normal(rows, 8), draw.normal(8, 5)), compiled=True)


LAYER = Exercise(
    id="90.5",
    title="One layer, one graph",
    entries=("layer",),
    cases=_cases,
    oracle=lambda x, weight: (x @ weight).relu() * 2,
    requirements=(CompilesWith(graphs=1, captured=3),),
    limits=Limits(seconds=60.0),
)

ONE_GRAPH = """
@torch.compile(backend="aot_eager", fullgraph=True)
def layer(x, weight):
    return torch.relu(x @ weight) * 2
"""
BROKEN = """
@torch.compile(backend="aot_eager")
def layer(x, weight):
    product = x @ weight
    print("a graph ends here")
    return torch.relu(product) * 2
"""
NEVER = """
def layer(x, weight):
    return torch.relu(x @ weight) * 2
"""
NOT_CALLED = """
def plain(x, weight):
    return torch.relu(x @ weight) * 2
compiled = torch.compile(plain, backend="aot_eager")
def layer(x, weight):
    return plain(x, weight)
"""
ELSEWHERE = """
@torch.compile(backend="aot_eager")
def twice(x):
    return x * 2
def layer(x, weight):
    return twice(torch.relu(x @ weight))
"""
CHANGED_SIZE = """
@torch.compile(backend="aot_eager", dynamic=False)
def half(x, weight):
    return torch.relu(x @ weight) * 2
def layer(x, weight):
    return torch.cat([half(x[:1], weight), half(x[1:], weight)])
"""
WRONG = ONE_GRAPH.replace("* 2", "* 3")


def test_a_compiled_answer_passes_and_the_verdict_states_its_graphs():
    verdict = judge(LAYER, ONE_GRAPH)
    assert verdict.passed, verdict
    assert verdict.message == "All 2 cases are right. `torch.compile` made 1 graph."


@pytest.mark.parametrize(
    "cell, words",
    [
        (
            BROKEN,
            "made 2 graphs, where 1 is asked for. The graph broke once, first here: Failed to trace builtin operator",
        ),
        (NEVER, "made no graph, where 1 is asked for: nothing was compiled."),
        (NOT_CALLED, "made no graph, where 1 is asked for: nothing was compiled."),
        (ELSEWHERE, "made 1 graph, as asked for, but of 1 call only, where at least 3 belong into it"),
        (CHANGED_SIZE, "made 2 graphs, where 1 is asked for."),
    ],
    ids=["a graph break", "never compiled", "compiled and not called", "the work is outside", "compiled twice"],
)
def test_another_number_of_graphs_is_rejected_by_count(cell, words):
    verdict = judge(LAYER, cell)
    assert (verdict.outcome, verdict.mistake) == ("failed", "wrong_number_of_graphs"), verdict
    assert verdict.message.startswith("The numbers are right, but: `torch.compile` ") and words in verdict.message


def test_a_wrong_answer_is_wrong_whether_compiled_or_not():
    verdict = judge(LAYER, WRONG)
    assert verdict.outcome == "failed" and "The numbers are right" not in verdict.message


def test_a_graph_break_where_none_is_allowed_is_told_with_its_reason():
    verdict = judge(LAYER, BROKEN.replace('"aot_eager"', '"aot_eager", fullgraph=True'))
    assert verdict.outcome == "error" and "how to trace builtin operator `print`" in verdict.message, verdict


def _eager_cases(draw):
    yield Case("3 rows", (draw.normal(3, 8), draw.normal(8, 5)))


EAGER = Exercise(
    id="90.6",
    title="Without the product",
    entries=("layer",),
    cases=_eager_cases,
    oracle=LAYER.oracle,
    requirements=(Forbids(("mm",)),),
)
MIXED = Exercise(
    id="90.7",
    title="Compiled once",
    entries=("layer",),
    cases=lambda draw: [*_cases(draw), *_eager_cases(draw)],
    oracle=LAYER.oracle,
    requirements=(CompilesWith(),),
    limits=Limits(seconds=60.0),
)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_where_nothing_is_to_be_compiled_no_operation_hides_in_a_graph(backend):
    """Nor does `fullgraph=True` raise."""
    verdict = judge(EAGER, ONE_GRAPH.replace("aot_eager", backend))
    assert verdict.mistake == "forbidden_operation" and "`mm`" in verdict.message, verdict


def test_compiled_cases_and_others_stand_in_one_exercise():
    verdict = judge(MIXED, ONE_GRAPH)
    assert verdict.passed and len(verdict.cases) == 3, verdict


INDUCTOR = Exercise(
    id="90.8",
    title="Fused",
    entries=("layer",),
    cases=lambda draw: [Case("a row", (draw.normal(4, 8), draw.normal(8, 5)), compiled=True)],
    oracle=LAYER.oracle,
    requirements=(CompilesWith(graphs=1, captured=3), Forbids(("relu",))),
    limits=Limits(seconds=120.0),
)


def test_inductor_compiles_in_the_confined_worker():
    """With the C++ compiler that it starts there; `relu` lies in the code that it wrote, and is called no more."""
    verdict = judge(INDUCTOR, ONE_GRAPH.replace('backend="aot_eager", ', ""))
    assert verdict.passed, verdict
    eager = judge(INDUCTOR, ONE_GRAPH)
    assert eager.mistake == "forbidden_operation", eager
