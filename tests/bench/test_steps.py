"""What chapter 14's picture shows is cut rightly out of a step's trace."""

from course_lib.bench.steps import STAGES, layer_of


def trace_of(layers: int, apart: float):
    """One kernel, five for each layer, two; a layer is `apart` µs long, the first one 100 µs longer."""
    kernels = [("begin", 0.0, 1.0)]
    for layer in range(layers):
        at = 2.0 + apart * layer + (100.0 if layer else 0.0)
        kernels += [(stage, at + 3.0 * number, 4.0 + number) for number, stage in enumerate(STAGES)]
    return [*kernels, ("logits", 1e4, 50.0), ("end", 2e4, 3.0)]


def test_a_layer_in_the_middle_and_the_time_from_one_to_the_next():
    found = layer_of(trace_of(8, 20.0), 8)
    assert found["layer_us"] == 20.0
    assert found["layer"] == [[stage, 3.0 * number, 4.0 + number] for number, stage in enumerate(STAGES)]


def test_few_layers_have_no_middle():
    assert layer_of(trace_of(4, 20.0), 4) == {}
