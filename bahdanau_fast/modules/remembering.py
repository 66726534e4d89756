"""What a module does besides attending: memories, scores, and why a call goes where."""

from __future__ import annotations

import torch
from torch import Tensor

from bahdanau_fast import backends, checks, reference
from bahdanau_fast.general import scores_inside
from bahdanau_fast.memory import Maker, Memory, ProjectedKeys, project
from bahdanau_fast.memory.key_cache import may_share
from bahdanau_fast.memory.shapes import as_rows, source_as_rows
from bahdanau_fast.modules.base import Additive, Layered
from bahdanau_fast.modules.layers import apply_layer, check_features, plain_weight
from bahdanau_fast.ops.lifetime import Lifetime
from bahdanau_fast.ops.projection import shared_linear
from bahdanau_fast.reference import TANH

__all__ = ["MakesMemories", "Remembering"]


class MakesMemories(Layered):
    """A module that projects keys once, for many calls."""

    #: Whether its operators read a table of exponentials.
    _reads_table = True

    def memory(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Memory:
        """Project the keys once, for any number of :meth:`attend` calls.

        Args:
            keys: (B,Tk,Dk). B may be any number of dimensions.
            values: (B,Tk,Dv); the keys themselves unless given.
            valid_lens: None, (B,) or (B,Tq), also as a list.
            mask: bool (B,Tk) or (B,Tq,Tk), True where a query may look; with lengths, both hold.

        Returns:
            A memory; gradients flow through it to ``keys``, ``values`` and the key layer.

        On a lazy module that was never called, this draws the weights of the key layer, then those
        of the scoring layer; the first :meth:`attend` draws those of the query layer. (The first
        call of the module itself draws the query layer's weights first, as the course's does.)

        Raises:
            TypeError, ValueError: as for calling the module.
        """
        values = keys if values is None else values
        keys, values, valid_lens, mask, batch = source_as_rows(keys, values, valid_lens, mask)
        checks.source(keys, values, valid_lens, mask)
        self._draw(None, keys)
        layer = self._modules[self._key_layer]
        check_features("keys", keys, layer)
        if self.bias is not None:
            checks.same_kind("keys", keys, "the module's bias", self.bias)
        backend = backends.resolve(keys.device, dtype=keys.dtype)
        weight, w_v = plain_weight(layer), plain_weight(self._modules[self._score_layer])
        if torch.compiler.is_compiling() or not may_share(keys, weight, self.bias):
            own, lifetime, weight = self._project(keys), None, None
        else:
            assert weight is not None
            lifetime = Lifetime()
            own, _ = shared_linear(keys, weight, self.bias, lifetime)
        due = None if lifetime is None else lifetime.begin()
        if w_v is None:  # attend will call the scoring layer instead of a kernel
            projected = ProjectedKeys(own, None, None, None, lifetime, due)
        else:
            projected = project(own, self._reads_table and backends.keeps_table(backend, own))
            projected = projected._replace(lifetime=lifetime, due=due)
            if self._reads_table or (lifetime is not None and backend == "cpu"):
                projected = projected.share(values, w_v, self._reads_table)
        maker = Maker.of(self, weight if backend == "cpu" else None, self.bias)
        seen = reference.visible(valid_lens, mask, keys.shape[1])
        return Memory(projected, values, seen, maker, batch)


class Remembering(MakesMemories, Additive):
    """An additive module with memories and scores; base of those with names."""

    def scores(self, queries: Tensor, memory: Memory, clip: float | None = None) -> Tensor:
        """The scores of a memory's keys, before any mask and the softmax.

        What is to be had instead of the softmax goes on top of them: log-probabilities, sparsemax,
        sampling. Lengths and mask of the memory are left to it.

        Args:
            queries: (B,Tq,Dq), or a decoder state (B,Dq); B as the memory's keys have it.
            memory: from :meth:`memory`.
            clip: give ``clip * tanh(score)``, as pointer networks do (Bello et al. 2016,
                https://arxiv.org/abs/1611.09940); None gives the scores themselves.

        Returns:
            (B,Tq,Tk), for a state (B,Tk), in the autograd graph; ``attention_weights`` stay as
            they are.

        Raises:
            TypeError, ValueError: as for :meth:`attend`; a clip that is no finite number.
        """
        queries, memory, _, shape = self._checked(queries, memory, None)
        self._draw(queries, None)
        check_features("queries", queries, self._modules[self._query_layer])
        if clip is not None:
            checks.finite("clip", clip)
        asked, keys = apply_layer(self._modules[self._query_layer], queries), memory.projected.keys
        layer = self._modules[self._score_layer]
        assert layer is not None
        w_v = plain_weight(layer)
        if w_v is None:
            scores = reference.projected_scores(asked, keys, layer)
            scores = reference.clipped(scores, clip).to(asked.dtype)
        else:
            route = backends.decide(
                *(asked, keys, memory.values, asked, None, w_v, None, self.num_hiddens, 0.0),
                keys_projected=True,
                general=True,
            )
            scores = scores_inside(route, asked, keys, w_v, TANH, clip)
        return scores if shape is None else shape.restore(scores)

    def explain(
        self,
        queries: Tensor,
        keys: Tensor | Memory,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> str:
        """How a call with these inputs would be computed, and why, without computing it.

        Args:
            queries: (B,Tq,Dq).
            keys: (B,Tk,Dk), or a memory.
            values: (B,Tk,Dv); the keys unless given.
            mask: of the call, or None.

        Raises:
            ValueError: the requested backend cannot serve the call.
        """
        w_q, w_k, w_v = self._plain_weights()
        known = isinstance(keys, Memory)
        masked = mask is not None
        if isinstance(keys, Memory):
            masked = masked or keys.is_masked
            queries, _, _ = keys.queries_as_rows(queries, None)
            w_k, values, keys = None, keys.values, keys.projected.keys
        values = keys if values is None else values
        queries, keys, values, _ = as_rows(queries, keys, values, None, None).rows
        rest = (self.bias, self.num_hiddens, self._dropout_p() or 0.0)
        route = backends.decide(
            *(queries, keys, values, w_q, w_k, w_v, *rest), keys_projected=known, masked=masked
        )
        return route.reason
