"""What is found in a graph: additive attention, by the numbers of its nodes and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Addend", "Axes", "Broadcast", "Piece", "ScoreMask"]

#: An order of axes, and the shape that they are brought to then.
Axes = tuple[list[int], list[int]]


class Broadcast(NamedTuple):
    """How a tensor is brought to some axes of the scores, with its features behind them."""

    shape: list[int]  # it is reshaped to this, of size one where it lacks an axis,
    order: list[int]  # its axes are permuted to this order,
    expanded: list[int]  # and are repeated to these sizes


@dataclass
class Addend:
    """One of the sum: ``factor * x``, or ``x @ w.T + bias``."""

    x: int
    rows: Tensor  # (scores, features): the element of x by score and feature
    factor: float = 1.0
    w: int | None = None
    w_index: Tensor | None = None  # (H, features): which elements of w the weight has
    bias: int | None = None
    key: bool = False  # of the keys
    broadcast: Any = None  # to the axes of queries, or of keys


@dataclass
class ScoreMask:
    """A tensor that hides scores, by its number."""

    number: int
    # "true": where it is; "false": where it is not; "far": where it is far below zero, as it is or
    # "subtracted"; "zero": where it is zero. A "factor" hides nothing: scores are multiplied by it.
    hides: str
    index: Tensor  # (scores,): which element of it each score has
    broadcast: Any = None


@dataclass
class Piece:
    """Additive attention in a graph: what is put off, where the operator runs, and on what.

    Tensors are numbers, sizes are small ones. Scores are (b,tq,tk); several vectors are the first
    axis of b.
    """

    anchor: int  # the node of the activation
    activation: str
    slope: float
    activated: int
    addends: list[Addend] = field(default_factory=list)
    late: set[int] = field(default_factory=set)  # calls that are put off
    before: set[int] = field(default_factory=set)  # calls of it that others need, run at once
    end: int = -1  # the last call
    first: int = -1  # the call before which the operator runs
    vector: int = -1
    vector_starts: list[int] = field(default_factory=list)  # the first element of each
    hidden: int = 0
    sizes: list[int] = field(default_factory=list)  # axes of the scores: batch, queries, keys
    groups: list[int] = field(default_factory=list)  # how many axes of each
    gate: list[Addend] = field(default_factory=list)  # what a sigmoid, a factor, is of
    pools: bool = False  # without a query
    after: list[tuple[str, Any]] = field(default_factory=list)  # (operation, operand) of scores
    masks: list[ScoreMask] = field(default_factory=list)
    fill: float | None = None  # what hidden scores become
    exact: bool = True  # the operator has what plain code has for rows that are hidden
    assumed: set[int] = field(default_factory=set)  # tensors that hold nothing but zero and one
    scores: int = -1
    weights: int | None = None
    context: int | None = None
    values: int = -1
    scores_axes: Axes = ([], [])
    weights_axes: Axes = ([], [])
    context_axes: Axes = ([], [])  # of (b,tq,features)
    values_axes: Axes = ([], [])  # to be (b,tk,features)
    certain: bool = True  # the operator has it for all inputs
    truths: set[int] = field(default_factory=set)  # calls that make masks, or what is filled in
    rest: str = ""  # why what follows the scores is none of it
    views: set[int] = field(default_factory=set)  # calls that view weights for others, too

    @property
    def outputs(self) -> list[int]:
        """What the operator gives: context and weights, or scores."""
        attended = [v for v in (self.context, self.weights) if v is not None]
        return attended if self.context is not None else [self.scores]
