"""SpeechBrain's recurrent decoders: keys, mask and previous weights are kept until ``reset()``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast.call import Located
from bahdanau_fast.fuse.families.family import Draw, Family, Outputs, located, scoring
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import apply_layer
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Content", "Location"]


class Content(Family):
    """ContentBasedAttention."""

    title = "SpeechBrain"
    how = "scores, softmax and context of each step, on the keys kept until reset()"
    layers: ClassVar[dict[str, type]] = {
        "mlp_enc": nn.Linear,
        "mlp_dec": nn.Linear,
        "mlp_attn": nn.Linear,
        "mlp_out": nn.Linear,
        "softmax": nn.Softmax,
    }
    counts = (3,)

    def forward(
        self, module: Any, step: Step, enc_states: Tensor, enc_len: Tensor, dec_states: Tensor
    ) -> Any:
        """Context (B,D) and weights (B,Tk); as :meth:`Family.forward`."""
        score = scoring(module.mlp_attn)
        if score is None or enc_len.dim() != 1:
            return NotImplemented
        if module.precomputed_enc_h is None:
            module.precomputed_enc_h = module.mlp_enc(enc_states)
            places = torch.arange(enc_states.shape[1], device=enc_len.device, dtype=enc_len.dtype)
            mask = places < enc_len.unsqueeze(1)
            module.mask = mask.to(enc_states.device, enc_len.dtype)
            self._begin(module, enc_len)
        bias, (inside, convolution) = self._inside(module)
        asked = apply_layer(module.mlp_dec, dec_states.unsqueeze(1), bias)
        context, weights = step.attend(
            *(asked, module.precomputed_enc_h, enc_states),
            step.scorer(*score, module.scaling),
            (module.mask != 0).unsqueeze(1),
            inside=inside,
            located=convolution,
            state=True,
        )
        self._end(module, weights)
        return apply_layer(module.mlp_out, context), weights

    def _begin(self, module: Any, enc_len: Tensor) -> None:
        """Set what a source begins with."""

    def _inside(self, module: Any) -> tuple[Tensor | None, tuple[Inside, Located | None]]:
        """What is added inside the tanh: a bias, and features of the keys."""
        return None, (TANH, None)

    def _end(self, module: Any, weights: Tensor) -> None:
        """Set what the next step needs."""

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs = []
        for source, steps in ((6, 3), (4, 1)):
            module.reset()
            states = draw(3, source, module.mlp_enc.in_features)
            lens = torch.tensor([source, 2, 4], device=states.device, dtype=states.dtype)
            for step in range(steps):
                query = draw(3, module.mlp_dec.in_features)
                context, weights = module.forward(states, lens, query)
                of = f"of step {step + 1}"
                outputs += [(f"the context {of}", context), (f"the weights {of}", weights)]
                kept = {name: each for name, each in vars(module).items() if torch.is_tensor(each)}
                outputs += [(f"{name} after step {step + 1}", each) for name, each in kept.items()]
            outputs = [(f"{name}, source of {source}", each) for name, each in outputs]
        return outputs


class Location(Content):
    """LocationAwareAttention."""

    how = f"{Content.how}, previous weights convolved"
    layers: ClassVar[dict[str, type]] = {
        **Content.layers,
        "conv_loc": nn.Conv1d,
        "mlp_loc": nn.Linear,
    }

    def forward(
        self, module: Any, step: Step, enc_states: Tensor, enc_len: Tensor, dec_states: Tensor
    ) -> Any:
        """Context (B,D) and weights (B,Tk); as :meth:`Family.forward`."""
        if scoring(module.mlp_loc) is None:
            return NotImplemented
        return super().forward(module, step, enc_states, enc_len, dec_states)

    def _begin(self, module: Any, enc_len: Tensor) -> None:
        module.prev_attn = module.mask * (1 / enc_len.float()).unsqueeze(1)

    def _inside(self, module: Any) -> tuple[Tensor | None, tuple[Inside, Located | None]]:
        before, w_f = module.prev_attn.unsqueeze(1), module.mlp_loc.weight
        return module.mlp_loc.bias, located(module.conv_loc, before, w_f)

    def _end(self, module: Any, weights: Tensor) -> None:
        module.prev_attn = weights.detach()
