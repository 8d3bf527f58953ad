"""What exercises share in `exercises/topics/`: how inputs are spread, what is asked of a kernel, what shows outside."""

import pytest

from course_lib.checker import Case, Moves, ReadByKernels
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.seen import RaisedError, Seen
from exercises.topics.evidence import raised
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.vector_inputs import spread


@pytest.mark.parametrize("scale, around", [(1.0, 0.0), (2e-3, 0.0), (60.0, 300.0)])
def test_numbers_lie_as_far_around_a_number_as_is_asked(scale, around):
    drawn = spread(scale, around)(Draw(3), 40, 50)
    assert drawn.shape == (40, 50)
    assert abs(float(drawn.mean()) - around) < 0.1 * scale and abs(float(drawn.std()) / scale - 1) < 0.1


@pytest.mark.parametrize("error, found", [("IndexError", True), ("StopIteration", True), ("KeyError", False)])
def test_an_error_is_known_by_its_class(error, found):
    seen = Seen(error=RaisedError(error, "pop from an empty list"))
    assert raised("IndexError", "StopIteration")(None, seen, None) is found
    assert not raised(error)(None, Seen(), None)


def complaint_of(requirements, seen, entry=None):
    return next(filter(None, (one.complaint(Case("a case", (), entry), seen) for one in requirements)), "")


def test_one_kernel_does_all_of_the_work():
    asked = in_one_kernel("rsqrt", elements=lambda: 8, least_bytes=lambda: 64, reads=(0, 2))
    assert complaint_of(asked[:3], Seen(launches=("one",), largest_allocation=8)) == ""
    assert "No Triton kernel ran" in complaint_of(asked, Seen())
    assert "2 Triton kernels" in complaint_of(asked, Seen(launches=("one", "two")))
    assert "rsqrt" in complaint_of(asked, Seen(launches=("one",), operations={"rsqrt": 1}))
    assert "mul" in complaint_of(asked, Seen(launches=("one",), operations={"mul": 1}))
    assert "9" in complaint_of(asked, Seen(launches=("one",), largest_allocation=9))
    assert isinstance(asked[3], Moves) and asked[3].minimum() == 64
    assert asked[4] == ReadByKernels((0, 2))


def test_calls_of_another_function_need_no_kernel():
    asked = in_one_kernel(elements=lambda: 8, least_bytes=lambda: 64, of="norm")
    assert "No Triton kernel ran" in complaint_of(asked, Seen(), "norm")
    assert complaint_of(asked[:3], Seen(), "tables") == ""
