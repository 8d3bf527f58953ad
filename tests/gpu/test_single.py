"""One token through all layers on a GPU: the five kernels, started early or not, and the one kernel, agree."""

import pytest
import torch

from course_lib.hardware.graphs import captured
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.layer.launched import decode_layer
from course_lib.kernels.layer.persistent import decode_layers
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.single import FORMS, SingleDecoder
from tests.kernels.layer.test_layer import EPSILON, bound, in_float64, make
from tests.serving.test_single import assert_logits_as_exact_as_the_models

BIG = (3, 2048, 8192, 32, 8, 64, 600)
ODD = (2, 1536, 1792, 12, 3, 128, 77)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=4096, layers=4, width=512, query_heads=8, key_heads=2, head_dim=64, hidden=1024, context=512
    )
    model = Decoder(config).eval()
    initialize(model)
    return model.to("cuda", request.param).requires_grad_(False)


def forms():
    return [form for form in FORMS if form != "dependent" or dependent_launches()]


@pytest.mark.parametrize("shape", [BIG, ODD], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_is_right(shape, dtype):
    for position in (0, 63, shape[-1] - 1):
        weights, state = make(*shape, dtype=dtype, seed=position)
        state.position.fill_(position)
        wanted = in_float64(weights, state, 1, position)
        arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        decode_layers(weights, state, 1, 1, EPSILON, arrived)
        found = state.stream, state.keys[1, :, position], state.values[1, :, position]
        for ours, right in zip(found, wanted):
            assert (ours.double() - right).abs().max().item() <= bound(right, dtype, 16)
        assert arrived.item() == 0 and not state.merged.any()


@pytest.mark.parametrize("shape", [BIG, ODD], ids=str)
def test_all_forms_give_the_same_bits_every_time(shape):
    """A stage that did not wait would read what the one before has not written yet."""
    weights, state = make(*shape, dtype=torch.bfloat16)
    state.position.fill_(40)
    start = state.stream.clone()
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launched(dependent):
        for layer in range(shape[0]):
            decode_layer(weights, state, layer, EPSILON, dependent=dependent)

    ways = {
        "launched": lambda: launched(False),
        "one": lambda: decode_layers(weights, state, 0, shape[0], EPSILON, arrived),
    }
    if dependent_launches():
        ways["dependent"] = lambda: launched(True)
    results = {}
    for name, way in ways.items():
        for _ in range(200):
            for scratch in (state.query, state.attended, state.hidden, state.partial, state.log_sum):
                scratch.fill_(torch.nan)
            state.stream.copy_(start)
            torch.cuda.synchronize()
            way()
            results.setdefault(name, state.stream.clone())
            assert torch.equal(state.stream, results[name]), name
    assert torch.equal(results["launched"], results.get("dependent", results["launched"]))
    # The same arithmetic, which the compiler contracts otherwise: a rounding of each of the layers' stages.
    apart = (results["one"].double() - results["launched"].double()).abs().max().item()
    assert apart <= bound(results["launched"].double(), torch.bfloat16, 5 * shape[0])


def test_forms_write_alike_captured_and_not(model):
    prompt = torch.randint(0, 4096, (1, 19), device="cuda")
    texts = {}
    for form in forms():
        writer = SingleDecoder(model, 200, form)
        texts[form] = writer.write(prompt, 150)
        assert torch.equal(texts[form], SingleDecoder(model, 200, form).write(prompt, 150))
        writer = SingleDecoder(model, 200, form)
        step = captured(writer.step)
        assert torch.equal(writer.write(prompt, 150, step), texts[form]), form
    assert torch.equal(texts["launched"], texts.get("dependent", texts["launched"]))


def test_logits_are_as_exact_as_the_models(model):
    for form in forms():
        assert_logits_as_exact_as_the_models(model, form)


def test_a_captured_step_keeps_its_decoder_alive_and_stays_within_the_cache(model):
    prompt = torch.randint(0, 4096, (1, 19), device="cuda")
    wanted = SingleDecoder(model, 30).write(prompt, 12)
    writer = SingleDecoder(model, 30)
    step = captured(writer.step)
    writer.read(prompt)
    token, after = writer.token, writer.state.position
    del writer
    torch.full((10**7,), float("nan"), device="cuda")  # takes memory that would be free
    for number in range(11):
        assert token.item() == wanted[0, 19 + number]
        step()
    for _ in range(50):
        step()
    assert after.item() == 29
