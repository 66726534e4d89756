"""ESPnet's recurrent decoders: keys and mask are kept until ``reset()``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast.call import Located
from bahdanau_fast.fuse.families.family import Draw, Family, Outputs, located, scoring
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import apply_layer
from bahdanau_fast.reference import TANH, Inside

__all__ = ["AttAdd", "AttCov", "AttLoc"]

Added = tuple[Tensor | None, tuple[Inside, Located | None]]
Before = Any  # weights of earlier steps: a tensor, a list of them, or None


class AttAdd(Family):
    """AttAdd."""

    title = "ESPnet"
    how = "scores, softmax and context of each step, on the keys kept until reset()"
    layers: ClassVar[dict[str, type]] = {
        "mlp_enc": nn.Linear,
        "mlp_dec": nn.Linear,
        "gvec": nn.Linear,
    }
    counts: ClassVar[tuple[int, ...]] = (5,)

    def forward(
        self,
        module: Any,
        step: Step,
        enc_hs_pad: Tensor,
        enc_hs_len: Any,
        dec_z: Tensor | None,
        before: Before,
        scaling: float = 2.0,
        last_attended_idx: int | None = None,
        *window: int,
    ) -> Any:
        """Context (B,D) and weights (B,Tk); as :meth:`Family.forward`."""
        score = scoring(module.gvec)
        lens = torch.as_tensor(enc_hs_len)
        fits = lens.dim() == 1 and int(lens.max()) == enc_hs_pad.shape[1]
        if score is None or not fits or last_attended_idx is not None:
            return NotImplemented
        batch = len(enc_hs_pad)
        if module.pre_compute_enc_h is None or module.han_mode:
            module.enc_h = enc_hs_pad
            module.h_length = enc_hs_pad.size(1)
            module.pre_compute_enc_h = module.mlp_enc(enc_hs_pad)
        if module.mask is None:
            places = torch.arange(enc_hs_pad.shape[1], device=lens.device)
            module.mask = (places >= lens.unsqueeze(1)).to(enc_hs_pad.device)
        if dec_z is None:
            dec_z = enc_hs_pad.new_zeros(batch, module.dunits)
        if before is None:
            before = self._first(enc_hs_pad, lens)
        bias, (inside, convolution) = self._inside(module, before)
        asked = apply_layer(module.mlp_dec, dec_z.view(batch, 1, module.dunits), bias)
        context, weights = step.attend(
            *(asked, module.pre_compute_enc_h, module.enc_h),
            step.scorer(*score, scaling),
            ~module.mask.unsqueeze(1),
            inside=inside,
            located=convolution,
            state=True,
        )
        return context, self._after(before, weights)

    def _first(self, enc_hs_pad: Tensor, lens: Tensor) -> Before:
        """The weights before the first step: uniform."""
        return None

    def _inside(self, module: Any, before: Before) -> Added:
        """What is added inside the tanh: a bias, and features of the keys."""
        return None, (TANH, None)

    def _after(self, before: Before, weights: Tensor) -> Any:
        """What the decoder gives to the next step."""
        return weights

    def _given(self, draw: Draw, source: int) -> Before:
        """What a rehearsal gives to the first step."""
        return None

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        for source, steps in ((6, 3), (4, 1)):
            module.reset()
            states = draw(3, source, module.eprojs)
            lens, before = [source, 2, 3], self._given(draw, source)
            for step in range(steps):
                query = draw(3, module.dunits) if step else None
                context, before = module.forward(states, lens, query, before)
                of = f"of step {step + 1}, source of {source}"
                weights = before[-1] if isinstance(before, list) else before
                outputs += [(f"the context {of}", context), (f"the weights {of}", weights)]
                outputs += [(f"{name} {of}", getattr(module, name)) for name in _KEPT]
        return outputs


_KEPT = ("pre_compute_enc_h", "enc_h", "mask")


class AttLoc(AttAdd):
    """AttLoc."""

    how = f"{AttAdd.how}, previous weights convolved"
    layers: ClassVar[dict[str, type]] = {
        **AttAdd.layers,
        "mlp_att": nn.Linear,
        "loc_conv": nn.Conv2d,
    }
    counts: ClassVar[tuple[int, ...]] = (5, 8)

    def _first(self, enc_hs_pad: Tensor, lens: Tensor) -> Before:
        lens = lens.to(enc_hs_pad.device)
        places = torch.arange(enc_hs_pad.shape[1], device=lens.device)
        seen = (places < lens.unsqueeze(1)).to(enc_hs_pad.dtype)
        return seen / lens.to(enc_hs_pad.dtype).unsqueeze(-1)

    def _inside(self, module: Any, before: Before) -> Added:
        location = before.view(len(before), 1, module.h_length)
        return module.mlp_att.bias, located(module.loc_conv, location, module.mlp_att.weight)


class AttCov(AttLoc):
    """AttCov."""

    how = f"{AttAdd.how}, with coverage"
    layers: ClassVar[dict[str, type]] = {**AttAdd.layers, "wvec": nn.Linear}
    counts = (5,)

    def _first(self, enc_hs_pad: Tensor, lens: Tensor) -> Before:
        return [super()._first(enc_hs_pad.float(), lens)]

    def _given(self, draw: Draw, source: int) -> Before:
        return [draw(3, source)]  # what it starts with of itself is fp32

    def _inside(self, module: Any, before: Before) -> Added:
        features = torch.as_tensor(sum(before)).unsqueeze(-1)
        return module.wvec.bias, (Inside(features, module.wvec.weight), None)

    def _after(self, before: Before, weights: Tensor) -> Any:
        before += [weights]
        return before
