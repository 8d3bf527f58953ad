"""A decoder that writes one sequence: at batch 1, each layer as five kernels of weights, or all layers as one kernel.

`Decoder` runs any batch through PyTorch's matrix products. At batch 1 those are products of a matrix with a vector, and
a step is bound by reading the weights once. Here the weights are packed in the order in which they are read, and every
number of a step, the next token and its position included, stays on the GPU, so a graph of a step replays by itself:

    writer = SingleDecoder(model, capacity=1024)
    step = captured(writer.step)        # course_lib.hardware.graphs; it runs some steps, so before a prompt is read
    writer.write(prompt, 100, step)     # the prompt runs through the model

Source of the kernels: `course_lib.kernels.layer`.
"""

import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.layer.launched import (
    LayerWeights,
    begin_token,
    decode_layer,
    end_token,
    layer_state,
    logit_tiles,
)
from course_lib.kernels.layer.persistent import decode_layers
from course_lib.models.decoder import Decoder
from course_lib.models.layers import rotary_angles
from course_lib.serving.caches.contiguous import KVCache, refuse_experts, refuse_latent, refuse_window
from course_lib.serving.caches.new import new_cache

FORMS = ("launched", "dependent", "one kernel")


class SingleDecoder:
    """Writes one sequence with the weights of a `Decoder`.

    Args:
        model: its weights are copied, packed.
        capacity: tokens that the sequence may have, prompt included.
        form: "launched", one kernel after another; "dependent", each started while the one before runs, which needs a
            GPU from sm_90 on; "one kernel", all layers in a kernel whose programs stay, which needs a GPU.

    Attributes:
        token: int64 [1], the newest token; `step` replaces it by the most likely next one.
        logits: float32 [vocabulary], of the last step.
        length: tokens in the cache, as the host counts them. A replayed graph does not count, and cannot refuse: where
            the cache is full, it writes its last place again. `write` counts, and refuses before that.

    Raises a ValueError for a form that this machine does not have, and for sizes without tiles.
    """

    def __init__(self, model: Decoder, capacity: int, form: str = "launched"):
        config, device = model.config, model.device
        refuse_latent(config, "SingleDecoder", "LatentCache")
        refuse_window(config, "SingleDecoder")
        refuse_experts(config, "SingleDecoder")
        if config.normed_heads:
            raise ValueError("config.normed_heads is True; its kernels do not normalise heads. Use stream instead.")
        if model.all_reduce is not None:
            raise ValueError("model is one rank's part of a model; SingleDecoder would leave out its sums. Use Engine.")
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; it must be one of {', '.join(map(repr, FORMS))}.")
        if form == "one kernel" and interpreting() or form == "dependent" and not dependent_launches():
            needs = "a GPU" if form == "one kernel" else "an NVIDIA GPU from sm_90 (Hopper) on"
            raise ValueError(f"form is {form!r}, which needs {needs}; 'launched' runs here.")
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; it must be a whole number of at least 1.")
        self.model, self.capacity, self.form = model, capacity, form
        self.epsilon = config.norm_epsilon
        self.weights = packed(model)
        places = torch.arange(capacity, device=device)
        angles = rotary_angles(places, config.head_dim, config.rotary_base, config.rotary_divisors)
        self.state = layer_state(self.weights, config.key_heads, config.head_dim, *angles)
        self.matrix = (model.embedding if model.logits is None else model.logits).weight.detach()
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(config.vocabulary, dtype=torch.float32, device=device)
        self._largest = self.logits.new_zeros(logit_tiles(config.vocabulary, config.width))
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.length = 0

    def read(self, prompt: torch.Tensor) -> None:
        """Begin anew with a prompt, int64 [1, tokens], at least one; `token` is the one that follows it.

        Raises a ValueError when it does not fit.
        """
        tokens = prompt.shape[-1]
        if prompt.dim() != 2 or prompt.shape[0] != 1 or not 1 <= tokens <= self.capacity:
            raise ValueError(
                f"prompt has shape {tuple(prompt.shape)}; it must be [1, tokens] with 1 to {self.capacity} tokens."
            )
        cache = new_cache(self.model, 1, tokens)
        assert isinstance(cache, KVCache)  # latent models were refused
        with torch.no_grad():
            logits = self.model(prompt, cache, last_only=True)[0, -1]
            self.state.keys[:, :, :tokens] = cache.keys[:, 0, :, :tokens]
            self.state.values[:, :, :tokens] = cache.values[:, 0, :, :tokens]
            self.state.position.fill_(tokens)
            self.token.copy_(logits.argmax(dim=-1, keepdim=True))
        self.length = tokens

    def step(self) -> None:
        """Add `token` to the cache, and replace it by the most likely next one. Waits for nothing, allocates nothing.

        Raises a ValueError when the cache is full.
        """
        self._count(1)
        dependent = self.form == "dependent"
        begin_token(self.token, self.model.embedding.weight.detach(), self.state, dependent=dependent)
        layers = self.model.config.layers
        if self.form == "one kernel":
            decode_layers(self.weights, self.state, 0, layers, self.epsilon, self._arrived)
        else:
            for layer in range(layers):
                decode_layer(self.weights, self.state, layer, self.epsilon, dependent=dependent)
        end_token(
            self.token, self.model.norm.weight.detach(), self.matrix, self.logits, self._largest, self.state,
            self.epsilon, dependent=dependent,
        )  # fmt: skip

    def write(self, prompt: torch.Tensor, new_tokens: int, step=None) -> torch.Tensor:
        """The prompt and what follows it, int64 [1, tokens + new_tokens]: greedy.

        step: what to call for each token, `self.step` or a capture of it. With a capture the host does not see
        that steps were made, so this counts them.
        """
        self.read(prompt)
        if self.length + new_tokens - 1 > self.capacity:
            raise ValueError(
                f"{self.length} tokens and {new_tokens} more do not fit: the cache holds {self.capacity}. Make a larger"
                " SingleDecoder."
            )
        written = [prompt, self.token.clone()[None]][: 1 + (new_tokens > 0)]
        with torch.no_grad():
            for _ in range(new_tokens - 1):
                before = self.length
                (step or self.step)()
                if self.length == before:
                    self._count(1)
                written.append(self.token.clone()[None])
        return torch.cat(written, dim=1)

    def _count(self, tokens: int) -> None:
        if self.length + tokens > self.capacity:
            raise ValueError(f"the cache is full: it holds {self.capacity} tokens. Make a larger SingleDecoder.")
        self.length += tokens


def packed(model: Decoder) -> LayerWeights:
    """Copies of a model's weights, those of all layers in one tensor each."""
    weights = dict(model.named_parameters())

    def of_layers(*names: str) -> torch.Tensor:
        """For each layer these matrices one below the other."""
        layers = range(model.config.layers)
        return torch.stack(
            [torch.cat([weights[f"blocks.{n}.{name}.weight"].detach() for name in names]) for n in layers]
        )

    return LayerWeights(
        project=of_layers("attention.query", "attention.key", "attention.value"),
        output=of_layers("attention.output"),
        feed=of_layers("feed_forward.gate", "feed_forward.up"),
        down=of_layers("feed_forward.down"),
        attention_gain=of_layers("attention_norm"),
        feed_gain=of_layers("feed_forward_norm"),
    )
