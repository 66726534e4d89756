"""What is found in a graph: additive attention, by the numbers of its nodes and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

#: An order of axes, and the shape that they are brought to then.
Axes = tuple[list[int], list[int]]


class Broadcast(NamedTuple):
    """How a tensor is brought to some axes of the scores, with its features behind them."""

    shape: list[int]  # it is reshaped to this, of size one where it lacks an axis,
    order: list[int]  # its axes are permuted to this order,
    expanded: list[int]  # and are repeated to these sizes


@dataclass
class Addend:
    """One of the sum under the activation: ``factor * x``, or ``x @ w.T + bias``."""

    x: int
    rows: Tensor  # (scores, features): the element of x by score and feature
    factor: float = 1.0
    w: int | None = None
    w_index: Tensor | None = None  # (H, features): the elements of w that are the weight
    bias: int | None = None
    of_keys: bool = False  # else of queries
    broadcast: Any = None  # a Broadcast to the axes of queries, or of keys


@dataclass
class ScoreMask:
    """A tensor that hides scores, by its number, and how."""

    number: int
    # Where it is "true", "false", "zero" or "nonzero", as what is added or subtracted. A "factor"
    # hides nothing: scores are multiplied by it.
    hides: str
    index: Tensor  # (scores,): its element by score
    broadcast: Any = None


@dataclass
class Piece:
    """Additive attention in a graph: the calls that the operator replaces, and its inputs.

    Tensors and calls are numbers, sizes are small ones. Scores are (b,tq,tk); several vectors
    ``w_v`` are the first axis of b. The operator runs later than most of these calls did, which are
    deferred until then; a row is hidden where a mask leaves no key.
    """

    # The sum under the activation, and its product with a vector.
    anchor: int  # the call of the activation
    activation: str
    slope: float
    activated: int
    addends: list[Addend] = field(default_factory=list)
    vector: int = -1
    vector_starts: list[int] = field(default_factory=list)  # the first element of every vector
    hidden: int = 0  # H
    gate: list[Addend] = field(default_factory=list)  # under a sigmoid, a factor of the activation
    is_pooling: bool = False  # has no query
    # Which axes of the scores are what.
    sizes: list[int] = field(default_factory=list)  # of the axes: batch, queries, keys
    groups: list[int] = field(default_factory=list)  # how many axes batch, queries and keys have
    # The softmax.
    score_ops: list[tuple[str, Any]] = field(default_factory=list)  # (operation, operand)
    masks: list[ScoreMask] = field(default_factory=list)
    fill: float | None = None  # what hidden scores become
    # What the operator computes, where: tensors, and how they get the axes that they have.
    scores: int = -1
    weights: int | None = None
    context: int | None = None
    values: int = -1
    scores_axes: Axes = ([], [])
    weights_axes: Axes = ([], [])
    context_axes: Axes = ([], [])  # of (b,tq,features)
    values_axes: Axes = ([], [])  # to be (b,tk,features)
    why_scores_only: str = ""  # without a context: why what follows the scores is no part of it
    # When it may run.
    hidden_rows_match: bool = True  # the operator computes of hidden rows what plain code does
    assumed_binary: set[int] = field(default_factory=set)  # tensors that must hold only 0 and 1
    unconditional: bool = True  # no test of its inputs decides whether the operator serves them
    # The calls in it.
    deferred: set[int] = field(default_factory=set)
    immediate: set[int] = field(default_factory=set)  # not deferred, since others need them
    mask_calls: set[int] = field(default_factory=set)  # that make masks, or what is filled in
    weight_views: set[int] = field(default_factory=set)  # that view the weights for others, too
    insert_before: int = -1  # the operator runs before this call
    end: int = -1  # the last call

    @property
    def outputs(self) -> list[int]:
        """What the operator gives: context and weights, or scores."""
        attended = [v for v in (self.context, self.weights) if v is not None]
        return attended if self.context is not None else [self.scores]
