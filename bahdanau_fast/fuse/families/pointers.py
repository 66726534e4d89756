"""Pointer networks: scores, before a mask and softmax that are the decoder's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast.fuse.families.family import Draw, Family, Outputs
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import apply_layer, is_unchanged

__all__ = ["Pointer"]


class Pointer(Family):
    """SimpleAttention of rl4co, pointer and glimpse; Attention of its forerunners."""

    title = "rl4co"
    how = "the scores; without gradients, unchanged keys are projected once"
    layers: ClassVar[dict[str, type]] = {
        "project_query": nn.Linear,
        "project_ref": nn.Conv1d,
        "v": nn.Parameter,
    }
    counts = (2,)

    @classmethod
    def objection(cls, module: Any) -> str | None:
        """As :meth:`Family.objection`."""
        size = module.project_ref.kernel_size
        return None if size == (1,) else f"its project_ref has a kernel of {size}"

    def forward(self, module: Any, step: Step, query: Tensor, ref: Tensor) -> Any:
        """Projected keys (B,H,Tk) and scores (B,Tk); as :meth:`Family.forward`."""
        layer = module.project_ref
        if type(layer) is not nn.Conv1d or not is_unchanged(layer) or query.dim() != 2:
            return NotImplemented
        asked = apply_layer(module.project_query, query.unsqueeze(1))
        w_k, w_v = layer.weight.squeeze(2), module.v.unsqueeze(0)
        scores, keys = step.scores(asked, ref.transpose(0, 1), w_k, layer.bias, w_v)
        scores = scores.squeeze(1)
        if module.use_tanh:
            scores = module.C * torch.tanh(scores)
        return keys.transpose(1, 2), scores

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        ref = draw(5, 3, module.project_ref.in_channels)
        for i in (1, 2):
            keys, scores = module.forward(draw(3, module.project_query.in_features), ref)
            outputs += [(f"the keys of step {i}", keys), (f"the scores of step {i}", scores)]
        return outputs
