"""Speech synthesis: Tacotron 2, where previous and summed weights are convolved."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast.call import Located
from bahdanau_fast.fuse.families.family import (
    Draw,
    Family,
    Outputs,
    applied,
    linear_of,
    located,
    scoring,
)
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import is_unchanged
from bahdanau_fast.reference import TANH, Inside

__all__ = ["Coqui", "Tacotron2"]


def _inside(layer: nn.Module, before: Tensor) -> tuple[Inside, Located | None] | None:
    """What a LocationLayer (a convolution, then a Linear) adds; None where it must be called.

    Args:
        layer: of the module.
        before: (B,2,Tk), weights of the step before and their sum.
    """
    convolution, dense = layer.children()
    parameters = scoring(dense)
    if parameters is None or parameters[1] is not None or not is_unchanged(layer):
        return None
    return located(convolution, before, parameters[0])


def _is_location(layer: nn.Module) -> bool:
    """Whether a layer has the children of a LocationLayer."""
    parts = list(layer.children())
    return (
        len(parts) == 2
        and any(isinstance(each, nn.Conv1d) for each in parts[0].modules())
        and linear_of(parts[1]) is not None
    )


_PLAIN: tuple[Inside, Located | None] | None = (TANH, None)


class Tacotron2(Family):
    """Attention of NVIDIA's Tacotron 2 and its copies; the decoder keeps the state."""

    title = "Tacotron 2"
    how = "scores, softmax and context, previous weights convolved"
    layers: ClassVar[dict[str, type]] = {
        "query_layer": nn.Linear,
        "memory_layer": nn.Linear,
        "v": nn.Linear,
        "location_layer": nn.Module,
    }
    counts = (5,)

    @classmethod
    def objection(cls, module: Any) -> str | None:
        """As :meth:`Family.objection`."""
        if not _is_location(module.location_layer):
            return "its location_layer is not a convolution and a Linear"
        return None

    def forward(
        self,
        module: Any,
        step: Step,
        state: Tensor,
        memory: Tensor,
        processed_memory: Tensor,
        before: Tensor,
        mask: Tensor | None,
    ) -> Any:
        """Context (B,D) and weights (B,Tk); as :meth:`Family.forward`."""
        score, added = scoring(module.v), _inside(module.location_layer, before)
        if score is None or added is None:
            return NotImplemented
        asked = applied(module.query_layer, state.unsqueeze(1))
        seen = None if mask is None else ~mask.unsqueeze(1)
        w_v = step.scorer(*score)
        inside, convolution = added
        return step.attend(
            *(asked, processed_memory, memory, w_v, seen),
            inside=inside,
            located=convolution,
            state=True,
        )

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        memory = draw(3, 5, _size(module.memory_layer))
        keys, before = module.memory_layer(memory), draw(3, 2, 5)
        mask = ~_seen(memory)
        for i in (1, 2):
            context, weights = module.forward(
                draw(3, _size(module.query_layer)), memory, keys, before, mask
            )
            outputs += [
                (f"the context of step {i}", context),
                (f"the weights of step {i}", weights),
            ]
            before = torch.stack([weights, before[:, 1] + weights], 1)
        return outputs


class Coqui(Family):
    """OriginalAttention of coqui and Mozilla TTS, with softmax and nothing else switched on."""

    title = "coqui TTS"
    how = "scores, softmax and context of each step"
    layers: ClassVar[dict[str, type]] = {
        "query_layer": nn.Linear,
        "inputs_layer": nn.Linear,
        "v": nn.Linear,
    }
    optional: ClassVar[dict[str, type]] = {"location_layer": nn.Module}
    counts = (4,)

    @classmethod
    def objection(cls, module: Any) -> str | None:
        """As :meth:`Family.objection`."""
        for option in ("windowing", "forward_attn", "trans_agent"):
            if getattr(module, option, False):
                return f"its {option} is on"
        norm = getattr(module, "norm", "softmax")
        if norm != "softmax":
            return f"its norm is {norm}"
        if module.location_attention and not _is_location(module.location_layer):
            return "its location_layer is not a convolution and a Linear"
        return None

    def forward(
        self,
        module: Any,
        step: Step,
        query: Tensor,
        inputs: Tensor,
        processed_inputs: Tensor,
        mask: Tensor | None,
    ) -> Any:
        """Context (B,D); as :meth:`Family.forward`."""
        score, added = scoring(module.v), _PLAIN
        if module.location_attention:
            before = (module.attention_weights, module.attention_weights_cum)
            added = _inside(module.location_layer, torch.stack(before, 1))
        if score is None or added is None or self.objection(module) is not None:
            return NotImplemented
        asked = applied(module.query_layer, query.unsqueeze(1))
        seen = None if mask is None else mask.unsqueeze(1)
        w_v = step.scorer(*score)
        inside, convolution = added
        context, weights = step.attend(
            *(asked, processed_inputs, inputs, w_v, seen),
            inside=inside,
            located=convolution,
            state=True,
        )
        if module.location_attention:
            module.update_location_attention(weights)
        module.attention_weights = weights
        return context

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        inputs = draw(3, 5, _size(module.inputs_layer))
        module.init_states(inputs)
        if module.location_attention:  # init_states knows fp32 alone
            module.attention_weights_cum = module.attention_weights_cum.to(inputs.dtype)
        module.attention_weights = module.attention_weights.to(inputs.dtype)
        keys = module.preprocess_inputs(inputs)
        mask = _seen(inputs)
        for i in (1, 2, 3):
            query = draw(3, _size(module.query_layer))
            outputs += [(f"the context of step {i}", module.forward(query, inputs, keys, mask))]
            outputs += [(f"the weights of step {i}", module.attention_weights)]
            if module.location_attention:
                outputs += [(f"the sum after step {i}", module.attention_weights_cum.clone())]
        return outputs


def _size(layer: nn.Module) -> int:
    """Features that a Linear, or a wrapper of one, takes."""
    inner = linear_of(layer)
    return 0 if inner is None else inner.in_features


def _seen(memory: Tensor) -> Tensor:
    """(B,Tk), True in the first few places of each row."""
    places = torch.arange(memory.shape[1], device=memory.device)
    return places < torch.arange(memory.shape[1], 0, -1, device=memory.device)[: len(memory), None]
