"""Additive attention in the graphs of ``torch.compile``: found, proved and replaced.

``torch.compile(model, backend="bahdanau_fast")`` hands graphs to inductor with the fused operator
in them; :func:`fuse_graph` is the rewrite alone, for who composes backends. The graph is read, not
run: sizes are its own symbols, and what is tried is tried on small tensors of our own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from bahdanau_fast.fuse.choice import Choice
from bahdanau_fast.graphs.caches import NoCaches, Shared
from bahdanau_fast.graphs.graph import Graph, reason
from bahdanau_fast.graphs.plan import FusedPlan
from bahdanau_fast.graphs.prove import in_state, isolated
from bahdanau_fast.graphs.rewrite import Rewriter


def fuse_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """As :func:`bahdanau_fast.fuse_graph`, which imports this when it is called."""
    with contextlib.suppress(Exception):  # whatever fails, the graph before it is used
        rewriter = Rewriter(graph, example_inputs, Shared(NoCaches()))
        for anchor in rewriter.activations():
            with contextlib.suppress(Exception):  # it is left
                piece, plan = rewriter.find(anchor, False)
                if not piece.is_pooling:  # it does not always pay, and nothing is timed here
                    rewriter.insert(piece, plan, _traced(rewriter.notes.graph, anchor, plan))
        return rewriter.rewritten()
    return graph


class NotAsWrittenError(Exception):
    """A graph computes something else than the code that it was captured from."""


# A checkpoint that is reentrant gives other gradients, and leaves are no leaves.
_OTHERWISE = {"tag_activation_checkpoint", "requires_grad_"}
# Forward mode, of which a graph tells the operator nothing.
_TANGENTS = {"_make_dual"}


def rewrite(graph: fx.GraphModule, example_inputs: Sequence[Any], record: Any, whole: bool) -> Any:
    """The backend of ``fuse``: the graph as it is, with the operator in it where that pays.

    Args:
        graph: as torch's compiler hands it to a backend.
        example_inputs: likewise.
        record: of the module, as a weak reference.
        whole: whether it is all of a forward.
    """
    fused, record = 0, record()
    names = {str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes}
    otherwise = names & (_TANGENTS | _OTHERWISE if torch.is_grad_enabled() else _TANGENTS)
    if whole and otherwise:
        raise NotAsWrittenError(", ".join(otherwise))
    if record is None or otherwise:
        return graph.forward
    record.compiled += 1
    try:
        rewriter = Rewriter(graph, example_inputs, record.shared)
        for anchor in rewriter.activations():
            try:
                piece, plan = rewriter.find(anchor, True)
                rewriter.insert(piece, plan)
            except Exception as error:
                record.leave(rewriter.source(anchor), reason(error))
            else:
                fused += 1
                record.fuse(rewriter.source(anchor), rewriter.notes.graph, piece)
        rewritten = rewriter.rewritten() if fused else None
    except Exception as error:
        record.leave("", f"cannot be looked at: {reason(error)}")
        fused = 0
    choice = Choice(graph, rewritten if fused else None, example_inputs, record.shared)
    record.choices += [choice] if fused else []
    return choice


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """The route of compiled code: no size decides."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _traced(graph: Graph, anchor: int, plan: FusedPlan) -> fx.Graph:
    """A plan by operators of torch alone, with their sizes as symbols."""
    from torch.fx.experimental.proxy_tensor import make_fx

    run = plan.run

    def planned(*inputs: Any) -> Any:  # what make_fx traces has no self
        return run(*inputs)

    trace = make_fx(planned, pre_dispatch=True, _allow_non_fake_inputs=True)
    with isolated(torch.device("cpu")), in_state(graph.nodes[anchor].state), _compiling():
        return trace(*[graph.values[number].tensor for number in plan.inputs]).graph


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, with the fused operator in the graph. A backend for ``torch.compile``.

    Args:
        graph: as ``torch.compile`` hands it to a backend.
        example_inputs: likewise.
        options: of inductor.
    """
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(fuse_graph(graph, example_inputs), example_inputs, **options)
    return compiled
