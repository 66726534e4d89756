"""Kinds of attention modules, for each a plain one and ours; ours may be the plain one, fused."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from course import CourseAttention, course_softmax
from torch import nn

import bahdanau_fast as bf

E, DK, DQ, DV = 6, 17, 5, 7  # features of an encoder's input, keys, queries and values
CHANNELS, TAPS = 4, 5  # of the convolution of previous and summed weights


class Location(nn.Module):
    """Location-sensitive attention from its formula, under the names of bf.LocationAttention."""

    def __init__(self, hidden, bias):
        super().__init__()
        self.W_q = nn.Linear(DQ, hidden, bias=False)
        self.W_k = nn.Linear(DK, hidden, bias=False)
        self.w_v = nn.Linear(hidden, 1, bias=False)
        self.conv = nn.Conv1d(2, CHANNELS, TAPS, padding=TAPS // 2, bias=False)
        self.W_f = nn.Linear(CHANNELS, hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden)) if bias else None
        self.dropout = nn.Dropout(0.0)

    def memory(self, keys, values, lens):
        keys = self.W_k(keys)
        return keys if self.bias is None else keys + self.bias, values, lens

    def attend(self, queries, memory, location):
        keys, values, lens = memory
        features = self.W_f(self.conv(location).transpose(1, 2))
        scores = self.w_v(torch.tanh(self.W_q(queries) + keys + features)).transpose(1, 2)
        self.attention_weights = course_softmax(scores.clone(), lens)
        return self.dropout(self.attention_weights) @ values

    def forward(self, queries, keys, values, location, lens):
        return self.attend(queries, self.memory(keys, values, lens), location)


class Rectified(CourseAttention):
    """The course's module with ReLU in the place of the tanh."""

    def forward(self, queries, keys, values, valid_lens):
        keys = self.W_k(keys) if self.bias is None else self.W_k(keys) + self.bias
        features = torch.relu(self.W_q(queries).unsqueeze(2) + keys.unsqueeze(1))
        self.attention_weights = course_softmax(self.score(features).squeeze(-1), valid_lens)
        return self.dropout(self.attention_weights) @ values


class Wrapped(nn.Module):
    """A layer in a module of its own, as NVIDIA's Tacotron 2 has each."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def linear(*sizes):
    return Wrapped(nn.Linear(*sizes, bias=False))


class LocationLayer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        conv = nn.Conv1d(2, CHANNELS, TAPS, padding=TAPS // 2, bias=False)
        self.location_conv = Wrapped(conv)
        self.location_dense = linear(CHANNELS, hidden)

    def forward(self, attention_weights_cat):
        return self.location_dense(self.location_conv(attention_weights_cat).transpose(1, 2))


class Tacotron(nn.Module):
    """The attention of NVIDIA's Tacotron 2: its names, its layers, its arguments."""

    def __init__(self, hidden):
        super().__init__()
        self.query_layer = linear(DQ, hidden)
        self.memory_layer = linear(DK, hidden)
        self.v = linear(hidden, 1)
        self.location_layer = LocationLayer(hidden)

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
    ):
        query = self.query_layer(attention_hidden_state.unsqueeze(1))
        inner = query + self.location_layer(attention_weights_cat) + processed_memory
        energies = self.v(torch.tanh(inner)).squeeze(-1).masked_fill(mask, float("-inf"))
        weights = torch.softmax(energies, 1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


def at_once(side, *inputs):
    """All queries in one call."""
    yield side.apply(*inputs), side.module.attention_weights


def by_memory(side, queries, keys, values, lens):
    """The same on a memory, where the module has them."""
    if side.step is not None or not hasattr(side.module, "memory"):
        yield from at_once(side, queries, keys, values, lens)
    else:
        memory = side.module.memory(keys, values, lens)
        yield side.module.attend(queries, memory), side.module.attention_weights


def nowhere(keys):
    """(B,2,Tk), where the first of some steps is told that earlier ones have looked."""
    return torch.arange(keys.shape[1], dtype=keys.dtype).cos().expand(len(keys), 2, -1)


def by_location(side, queries, keys, values, lens):
    """A step for each query, which sees the weights of those before."""
    location, memory = nowhere(keys), None
    if side.step is None:
        memory = side.module.memory(keys, values, lens)
    for query in queries.split(1, 1):
        if memory is None:
            context = side.apply(query, keys, values, location, lens)
        else:
            context = side.module.attend(query, memory, location)
        weights = side.module.attention_weights
        yield context, weights
        location = torch.cat([weights, location[:, 1:] + weights], 1)


def by_tacotron(side, queries, keys, values, lens):
    """The same as the decoder of Tacotron 2 does it."""
    location, processed = nowhere(keys), side.module.memory_layer(keys)
    pad = torch.arange(keys.shape[1]) >= lens.clamp(min=1)[:, None]
    for state in queries.unbind(1):
        context, weights = side.apply(state, values, processed, location, pad)
        yield context, weights
        location = torch.stack([weights, location[:, 1] + weights], 1)


class Kind(NamedTuple):
    """A kind of module.

    Attributes:
        plain: makes the plain module of hidden size and whether there is a bias.
        ours: makes ours, of ``cache_keys`` too; None where ours is a plain one, fused.
        steps: a side's call: contexts and weights.
        layers: the places of each layer, by its name in bf.LocationAttention.
    """

    plain: Callable
    ours: Callable | None
    steps: Callable
    layers: dict[str, tuple[str, ...]]


def course(hidden, bias):
    return CourseAttention(DK, DQ, hidden, bias=bias)


_ADDITIVE = {name: (name,) for name in ("W_k", "W_q", "w_v", "dropout")}
_TACOTRON = {
    "W_k": ("memory_layer",),
    "W_q": ("query_layer", "query_layer.layer"),
    "w_v": ("v",),
    "W_f": ("location_layer.location_dense",),
    "conv": ("location_layer.location_conv.layer", "location_layer.location_conv"),
    "location": ("location_layer",),
}


def _additive(hidden, bias, cache_keys, **options):
    return bf.AdditiveAttention(DK, DQ, hidden, bias=bias, cache_keys=cache_keys, **options)


KINDS = {
    "additive": Kind(course, _additive, at_once, _ADDITIVE),
    "memory": Kind(course, _additive, by_memory, _ADDITIVE),
    "relu": Kind(
        lambda hidden, bias: Rectified(DK, DQ, hidden, bias=bias),
        partial(_additive, activation="relu"),
        at_once,
        _ADDITIVE,
    ),
    "location": Kind(
        Location,
        lambda hidden, bias, _: bf.LocationAttention(
            DK, DQ, hidden, CHANNELS, TAPS, inputs=2, bias=bias
        ),
        by_location,
        _ADDITIVE | {name: (name,) for name in ("W_f", "conv")},
    ),
    "fused course": Kind(lambda hidden, _: course(hidden, False), None, at_once, _ADDITIVE),
    "fused Tacotron 2": Kind(lambda hidden, _: Tacotron(hidden), None, by_tacotron, _TACOTRON),
}
