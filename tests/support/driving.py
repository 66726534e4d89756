"""Each peer's module, and a few decoder steps with it as its own decoder takes them.

A driver yields (kind, tensor): outputs of steps and what the module keeps. Its inputs come from
``draw``, in the dtype of the module.
"""

from typing import Any, NamedTuple

import published
import pytest
import torch
import whole

B, STEPS = 4, 3
SOURCES = (23, 17)  # lengths of two batches, one after the other
D, Q, H = 40, 36, 48


class Peer(NamedTuple):
    """What makes a module, and runs steps with it on one batch."""

    make: Any
    steps: Any

    def drive(self, module, draw):
        """Steps on two batches, one after the other."""
        for source in SOURCES:
            yield from self.steps(module, draw, source)


def lens_of(source, dtype=torch.int64):
    return torch.tensor([source, 2, source // 2, 5], dtype=dtype)


def mask_of(source):
    return (torch.arange(source) + torch.arange(B).unsqueeze(1)) % 3 > 0


def named(found):
    """Context and weights, with their kinds."""
    return zip(("context", "weights"), found, strict=True)


def d2l(module, draw, source):
    keys, values = draw(B, source, D), draw(B, source, 7)
    for _ in range(STEPS):
        yield "context", module(draw(B, 2, Q), keys, values, lens_of(source))
        yield "weights", module.attention_weights


def two(module, draw, source):
    keys = draw(B, source, Q)
    for _ in range(STEPS):
        yield from named(module(draw(B, 1, Q), keys))


def captioning(module, draw, source):
    keys = draw(B, source, D)
    for _ in range(STEPS):
        yield from named(module(keys, draw(B, Q)))


def joeynmt(module, draw, source):
    values = draw(B, source, D)
    module.compute_proj_keys(values)
    for _ in range(STEPS):
        mask = mask_of(source).unsqueeze(1)
        yield from named(module(draw(B, 1, Q), mask, values))


def speechbrain(module, draw, source):
    module.reset()
    states = draw(B, source, D)
    lens = lens_of(source, states.dtype)  # of the dtype, for fp64 to be possible
    for _ in range(STEPS):
        yield from named(module(states, lens, draw(B, Q)))
    yield "mask", module.mask
    yield "keys", module.precomputed_enc_h


def espnet(module, draw, source):
    module.reset()
    states, before = draw(B, source, D), None
    for step in range(STEPS):
        state = draw(B, Q) if step else None
        context, before = module(states, lens_of(source).tolist(), state, before)
        yield from named((context, before))
    yield "mask", module.mask
    yield "keys", module.pre_compute_enc_h


def coverage(module, draw, source):
    module.reset()
    states, before = draw(B, source, D), [draw(B, source)]
    for _ in range(STEPS):
        lens = lens_of(source).tolist()
        context, before = module(states, lens, draw(B, Q), before, scaling=1.5)
        yield from named((context, before[-1]))


def opennmt(module, draw, source):
    keys = draw(B, source, Q)
    for shape, lens in (((B, Q), lens_of(source)), ((B, 3, Q), lens_of(source)), ((B, Q), None)):
        states, weights = module(draw(*shape), keys, lens)
        yield from (("states", states), ("weights", weights))


def allennlp(module, draw, source):
    keys = draw(B, source, D)
    mask = mask_of(source) & (torch.arange(B).unsqueeze(1) > 0)  # nothing in the first row
    for seen in (mask, mask, None):
        yield "weights", module(draw(B, Q), keys, seen)


def pointer(module, draw, source):
    ref = draw(source, B, Q)
    for _ in range(STEPS):
        keys, scores = module(draw(B, Q), ref)
        yield from (("keys", keys), ("scores", scores))


def tacotron(module, draw, source):
    memory, before = draw(B, source, D), draw(B, 2, source)
    keys = module.memory_layer(memory)
    pad = torch.arange(source) >= lens_of(source).unsqueeze(1)
    for _ in range(STEPS):
        context, weights = module(draw(B, Q), memory, keys, before, pad)
        yield from named((context, weights))
        before = torch.stack([weights, before[:, 1] + weights], 1)


def coqui(module, draw, source):
    inputs = draw(B, source, D)
    module.init_states(inputs)
    module.attention_weights = module.attention_weights.to(inputs.dtype)
    if module.location_attention:
        module.attention_weights_cum = module.attention_weights_cum.to(inputs.dtype)
    keys = module.preprocess_inputs(inputs)
    seen = torch.arange(source) < lens_of(source).unsqueeze(1)
    for _ in range(STEPS):
        yield "context", module(draw(B, Q), inputs, keys, seen)
        yield "weights", module.attention_weights


def peer(steps, module, name, *args, **kwargs):
    """Of another package; the test is skipped where that cannot be had."""

    def make():
        try:
            return published.load(module, name)(*args, **kwargs)
        except published.UnavailableError as error:
            pytest.skip(str(error))

    return Peer(make, steps)


SPEECHBRAIN, ESPNET = "speechbrain.nnet.attention", "espnet.nets.pytorch_backend.rnn.attentions"
RL4CO, COQUI = "rl4co.models.zoo.ptrnet.decoder", "TTS.tts.layers.tacotron.attentions"
ALLENNLP = "allennlp.modules.attention.additive_attention"
SIZES = (D, Q, H)
OPTIONS = {
    **dict.fromkeys(("windowing", "forward_attn", "trans_agent", "forward_attn_mask"), False),
    **{"attention_location_n_filters": 4, "attention_location_kernel_size": 5, "norm": "softmax"},
}
PEERS = {
    # That no index has.
    "tutorial": Peer(lambda: whole.Tutorial(Q), two),
    "captioning": Peer(lambda: whole.Captioning(*SIZES), captioning),
    "d2l": peer(d2l, "d2l.torch", "AdditiveAttention", H, 0.0),
    "joeynmt": peer(joeynmt, "joeynmt.attention", "BahdanauAttention", H, D, Q),
    "speechbrain": peer(speechbrain, SPEECHBRAIN, "ContentBasedAttention", *SIZES, 5, scaling=1.5),
    "speechbrain location": peer(
        speechbrain, SPEECHBRAIN, "LocationAwareAttention", *SIZES, 5, 6, 4
    ),
    "espnet": peer(espnet, ESPNET, "AttAdd", *SIZES),
    "espnet location": peer(espnet, ESPNET, "AttLoc", *SIZES, 6, 4),
    "espnet coverage": peer(coverage, ESPNET, "AttCov", *SIZES),
    "opennmt": peer(
        opennmt, "onmt.modules.global_attention", "GlobalAttention", Q, attn_type="mlp"
    ),
    "allennlp": peer(allennlp, ALLENNLP, "AdditiveAttention", Q, D),
    "rl4co pointer": peer(pointer, RL4CO, "SimpleAttention", Q, use_tanh=True, C=5),
    "rl4co glimpse": peer(pointer, RL4CO, "SimpleAttention", Q),
    "tacotron": peer(tacotron, "speechbrain.lobes.models.Tacotron2", "Attention", Q, D, H, 4, 5),
    **{
        name: peer(
            coqui, COQUI, "OriginalAttention", Q, D, H, location_attention=location, **OPTIONS
        )
        for name, location in (("coqui", False), ("coqui location", True))
    },
}
