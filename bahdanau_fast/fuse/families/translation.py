"""Translation toolkits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bahdanau_fast import reference
from bahdanau_fast.fuse.families.family import Draw, Family, Outputs, scoring
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.modules.layers import apply_layer

__all__ = ["AllenNLP", "Gnmt", "JoeyNMT", "OpenNMT"]


class JoeyNMT(Family):
    """BahdanauAttention of JoeyNMT, whose decoder asks it to project the keys."""

    title = "JoeyNMT"
    how = "scores, softmax and context, on the keys of compute_proj_keys()"
    layers: ClassVar[dict[str, type]] = {
        "key_layer": nn.Linear,
        "query_layer": nn.Linear,
        "energy_layer": nn.Linear,
    }
    counts = (3,)

    def forward(
        self, module: Any, step: Step, query: Tensor, mask: Tensor | None, values: Tensor
    ) -> Any:
        """Context (B,1,Dv) and weights (B,1,Tk); as :meth:`Family.forward`."""
        score = scoring(module.energy_layer)
        if score is None or mask is None or module.proj_keys is None:
            return NotImplemented
        module._check_input_shapes_forward(query=query, mask=mask, values=values)
        module.compute_proj_query(query)
        w_v = step.scorer(*score)
        return step.attend(module.proj_query, module.proj_keys, values, w_v, mask > 0)

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        values = draw(3, 5, module.key_layer.in_features)
        module.compute_proj_keys(values)
        for step in (1, 2):
            query = draw(3, 1, module.query_layer.in_features)
            context, weights = module.forward(query, _mask(values), values)
            outputs += [(f"the context of step {step}", context)]
            outputs += [(f"the weights of step {step}", weights), ("proj_query", module.proj_query)]
        return outputs


class OpenNMT(Family):
    """GlobalAttention of OpenNMT-py with attn_type "mlp"."""

    title = "OpenNMT-py"
    how = "scores, softmax and context; unchanged keys are projected once"
    layers: ClassVar[dict[str, type]] = {
        "linear_context": nn.Linear,
        "linear_query": nn.Linear,
        "v": nn.Linear,
        "linear_out": nn.Linear,
    }
    counts = (4,)

    @classmethod
    def objection(cls, module: Any) -> str | None:
        """As :meth:`Family.objection`."""
        kind = getattr(module, "attn_func", "softmax")
        return None if kind == "softmax" else f"its attn_func is {kind}"

    def forward(
        self,
        module: Any,
        step: Step,
        src: Tensor,
        enc_out: Tensor,
        src_len: Tensor | None = None,
        coverage: Tensor | None = None,
    ) -> Any:
        """Attentional states (B,Tq,D) and weights (B,Tq,Tk); as :meth:`Family.forward`."""
        score = scoring(module.v)
        if score is None or coverage is not None:
            return NotImplemented
        queries = src.unsqueeze(1) if src.dim() == 2 else src
        seen = None
        if src_len is not None:
            places = torch.arange(enc_out.shape[1], device=src_len.device)
            seen = (places < src_len.unsqueeze(1)).unsqueeze(1)
        asked = apply_layer(module.linear_query, queries)
        w_v, layer = step.scorer(*score), module.linear_context
        state = src.dim() == 2
        context, weights = step.attend(asked, enc_out, enc_out, w_v, seen, layer=layer, state=state)
        return module.linear_out(torch.cat([context, src], -1)), weights

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        keys = draw(3, 5, module.linear_context.in_features)
        lens = torch.tensor([5, 2, 3], device=keys.device)
        for queries, src_len in (((), lens), ((2,), lens), ((), None)):
            asked = draw(3, *queries, module.linear_query.in_features)
            states, weights = module.forward(asked, keys, src_len)
            of = f"of {queries or 'one'} queries, lengths {src_len is not None}"
            outputs += [(f"the result {of}", states), (f"the weights {of}", weights)]
        return outputs


class AllenNLP(Family):
    """AdditiveAttention of AllenNLP: weights, or scores where it does not normalise."""

    title = "AllenNLP"
    how = "the scores; unchanged keys are projected once"
    layers: ClassVar[dict[str, type]] = {
        "_w_matrix": nn.Parameter,
        "_u_matrix": nn.Parameter,
        "_v_vector": nn.Parameter,
    }
    counts = (3,)

    def forward(
        self, module: Any, step: Step, vector: Tensor, matrix: Tensor, mask: Tensor | None = None
    ) -> Any:
        """Weights or scores (B,Tk); as :meth:`Family.forward`."""
        if matrix.dim() != 3 or vector.dim() != 2:
            return NotImplemented
        asked = vector.matmul(module._w_matrix).unsqueeze(1)
        scores, _ = step.scores(asked, matrix, module._u_matrix.t(), None, module._v_vector.t())
        if not module._normalize:
            return scores.squeeze(1)
        if mask is None:
            return scores.squeeze(1).softmax(-1)
        if mask.dim() != 2:
            return NotImplemented
        seen = mask != 0  # a row with nothing to look at has no weights here
        return reference.masked_softmax(scores, mask=seen.unsqueeze(1)).squeeze(1) * seen

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        keys = draw(3, 5, module._u_matrix.shape[0])
        mask = _mask(keys).squeeze(1)
        mask = torch.cat([mask[:2], torch.zeros_like(mask[2:])])
        return [
            (f"the result {i}", module.forward(draw(3, module._w_matrix.shape[0]), keys, seen))
            for i, seen in enumerate((mask, mask, None), 1)
        ]


class Gnmt(Family):
    """BahdanauAttention of NVIDIA's GNMT, normalised or not."""

    title = "GNMT"
    how = "scores, softmax and context; unchanged keys are projected once"
    layers: ClassVar[dict[str, type]] = {
        "linear_q": nn.Linear,
        "linear_k": nn.Linear,
        "linear_att": nn.Parameter,
    }
    optional: ClassVar[dict[str, type]] = {
        "normalize_scalar": nn.Parameter,
        "normalize_bias": nn.Parameter,
    }
    counts = (2,)

    def forward(self, module: Any, step: Step, query: Tensor, keys: Tensor) -> Any:
        """Context and weights, the batch where it is in the inputs; as :meth:`Family.forward`."""
        first = module.batch_first
        if not first:
            keys = keys.transpose(0, 1)
        one = query.dim() == 2
        queries = query.unsqueeze(1) if one else query if first else query.transpose(0, 1)
        w_v, bias = module.linear_att, None
        if module.normalize:
            bias = module.normalize_bias
            w_v = w_v / w_v.norm() * module.normalize_scalar
        asked = apply_layer(module.linear_q, queries, bias)
        seen = None if module.mask is None else ~module.mask.unsqueeze(1)
        layer = module.linear_k
        results = step.attend(asked, keys, keys, w_v.unsqueeze(0), seen, layer=layer, state=one)
        return results if one or first else tuple(each.transpose(0, 1) for each in results)

    def rehearse(self, module: Any, draw: Draw) -> Outputs:
        """As :meth:`Family.rehearse`."""
        outputs: Outputs = []
        first = module.batch_first
        keys = (
            draw(3, 5, module.linear_k.in_features)
            if first
            else draw(5, 3, module.linear_k.in_features)
        )
        module.set_mask(torch.tensor([5, 2, 3], device=keys.device), keys)
        size = module.linear_q.in_features
        for shape in ((3, size), (3, 2, size) if first else (2, 3, size)):
            context, weights = module.forward(draw(*shape), keys)
            of = f"of queries {shape}"
            outputs += [(f"the context {of}", context), (f"the weights {of}", weights)]
        return outputs


def _mask(keys: Tensor) -> Tensor:
    """(B,1,Tk), not a prefix, with something to look at in each row."""
    places = torch.arange(keys.shape[1], device=keys.device)
    rows = torch.arange(keys.shape[0], device=keys.device).unsqueeze(1)
    return ((places + rows) % 3).bool().unsqueeze(1)
