"""Additive attention in the graphs of ``torch.compile``, by the rules that serve eager code.

``torch.compile(model, backend="bahdanau_fast")`` hands graphs to inductor with the fused operator
in them; :func:`fuse_graph` is the rewrite alone, for who composes backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from bahdanau_fast.fuse.watch import Caches, Watch

__all__ = ["backend", "fuse_graph"]


class _NoCaches(Caches):
    """A graph keeps nothing between calls."""

    def cache(self, vector: Tensor, w_k: Tensor | None) -> None:
        return None


def fuse_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph with additive attention as the fused operator; the same one where it has none.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[Any] = []
    watch = Watch(_NoCaches(), 0, lambda state, why: found.append(state) if why is None else None)
    traced = make_fx(
        lambda *inputs: watch.run(graph, *inputs), pre_dispatch=True, _allow_non_fake_inputs=True
    )
    try:
        # The route of compiled code: no size decides.
        with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
            made = traced(*example_inputs)
    except Exception:  # what cannot be traced so stays as it is
        return graph
    return made if found else graph


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, with the fused operator in the graph. A backend for ``torch.compile``.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise.
        options: of inductor.
    """
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(fuse_graph(graph, example_inputs), example_inputs, **options)
    return made
