"""Additive attention as public code writes it: each style of computation in a few lines.

``STYLES`` has each style by its name. Sizes differ from each other, so that no axis is taken for
another, but at the end of the section on whole models. Where ``reason`` is not empty, ``fuse`` has
to leave the style, and the report says that.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import whole
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

B, TQ, TK, DQ, DK, DV, H = 4, 5, 7, 10, 9, 13, 16
HEADS, STEPS = 2, 3
LENS = 7, 2, 4, 1


class Style(NamedTuple):
    """What makes a module; its inputs; what the report says where it is left."""

    make: Any
    inputs: Any
    reason: str = ""

    def drawn(self, dtype=torch.float32):
        """Inputs, and those of them that gradients are asked of."""
        leaves, generator = [], torch.Generator().manual_seed(1)

        def draw(*shape):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            leaves.append(drawn.to(torch.get_default_device(), dtype).requires_grad_())
            return leaves[-1]

        return self.inputs(draw), leaves


STYLES = {}
NONE, NO_ROWS = "no additive attention", "nothing is broadcast"


class Additive(nn.Module):
    """The usual layers, for the styles of which the forward alone is of interest."""

    def __init__(self, query=DQ, key=DK, hidden=H):
        super().__init__()
        self.W = nn.Linear(query, hidden)
        self.U = nn.Linear(key, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def both(self, query, keys):
        """The sum, of one query (B,DQ) or of several (B,TQ,DQ)."""
        query, keys = self.W(query), self.U(keys)
        return query.unsqueeze(-2) + (keys if query.dim() == 2 else keys.unsqueeze(1))

    def energy(self, query, keys):
        return self.v(torch.tanh(self.both(query, keys))).squeeze(-1)

    def look(self, both, values):
        """With this sum of addends."""
        return attend(self.v(torch.tanh(both)).squeeze(-1), values)


def add(name, inputs, function, reason="", **layers):
    """Registers a forward, of a module with the usual layers and with these."""
    kind = type(name, (Additive,), {"forward": function, "__module__": __name__})

    def make():
        module = kind()
        for attribute, layer in layers.items():
            setattr(module, attribute, layer())
        return module

    STYLES[name] = Style(make, inputs, reason)


def forward(inputs, reason="", **layers):
    return lambda function: add(function.__name__, inputs, function, reason, **layers)


def shapes(*sizes):
    return lambda draw: tuple(draw(*size) for size in sizes)


step = shapes((B, DQ), (B, TK, DK))  # a decoder state and keys
many = shapes((B, TQ, DQ), (B, TK, DK))
loop = shapes((B, STEPS, DV), (B, DQ), (B, TK, DK))  # inputs of steps, the first state, keys
time_first = shapes((B, DQ), (TK, B, DK))
same_size = shapes((B, DK), (B, TK, DK))
keys_alone = shapes((B, TK, DK))


def keep():
    """True at the keys that are no padding."""
    return torch.arange(TK) < torch.tensor(LENS).unsqueeze(1)


def masked(inputs, mask=keep):
    return lambda draw: (*inputs(draw), mask())


def linear(*sizes):
    return partial(nn.Linear, *sizes)


def conv(*sizes):
    return partial(nn.Conv1d, *sizes, 1)


def free(*shape):
    """A parameter."""
    return lambda: nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def attend(scores, values):
    weights = torch.softmax(scores, -1)
    if weights.dim() == 2:
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1), weights
    return weights @ values, weights


# ---- one part written in its own way, the others as usual


class Parts(Additive):
    """A decoder state q (B,H) and keys k (B,TK,H), both projected; v (H,); a mask (B,TK)."""

    def __init__(self, **ways):
        super().__init__()
        self.join = ways.get("join", lambda q, k: torch.tanh(q.unsqueeze(1) + k))
        self.score = ways.get("score", lambda h, v: h @ v)
        self.weigh = ways.get("weigh", lambda x, mask: torch.softmax(x, -1))

    def forward(self, query, keys, mask):
        scores = self.score(self.join(self.W(query), self.U(keys)), self.v.weight[0])
        weights = self.weigh(scores, mask)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1), weights


def added_in_place(q, k):
    k += q.unsqueeze(1)
    return torch.tanh(k)


def mask_by_slices(x, mask):
    for row, length in enumerate(LENS):
        x[row, length:] = -float("inf")
    return x.softmax(1)


def sparsemax(x, mask):
    ordered = x.sort(dim=1, descending=True).values
    above = ordered.cumsum(1) - 1
    size = (torch.arange(1, TK + 1) * ordered > above).sum(1, keepdim=True)
    return (x - above.gather(1, size - 1) / size).clamp(min=0)


PARTS = {
    "join": {
        "added_in_place": added_in_place,
        "tanh_in_place": lambda q, k: (q[:, None] + k).tanh_(),
        "relu_in_place": lambda q, k: (q[:, None] + k).relu_(),
        "module_tanh": lambda q, k: nn.Tanh()(k + q.unsqueeze(1)),
        "leaky_relu": lambda q, k: F.leaky_relu(q.unsqueeze(1) + k, 0.2),
        "sigmoid": lambda q, k: torch.sigmoid(q.unsqueeze(1) + k),
        "expanded": lambda q, k: (q.unsqueeze(1).expand(B, TK, H) + k).tanh(),
        "broadcast": lambda q, k: torch.add(*torch.broadcast_tensors(q[:, None], k)).tanh(),
        "repeated": lambda q, k: torch.tanh(q.unsqueeze(1).repeat(1, TK, 1) + k),
        "interleaved": lambda q, k: (q.repeat_interleave(TK, 0).view_as(k) + k).tanh(),
        "stacked": lambda q, k: torch.tanh(torch.stack([q] * k.size(1), dim=1) + k),
        "flattened": lambda q, k: (q.repeat(1, TK).view(-1, H) + k.view(-1, H)).tanh().view_as(k),
        "expanded_as": lambda q, k: (q[:, None].expand_as(torch.empty_like(k)) + k).tanh(),
        "viewed_as": lambda q, k: (q.repeat(1, TK).view_as(torch.empty_like(k)) + k).tanh(),
        "reshaped_as": lambda q, k: (q.repeat(1, TK).reshape_as(torch.empty_like(k)) + k).tanh(),
        "broadcast_to": lambda q, k: (torch.broadcast_to(q[:, None], k.shape) + k).tanh(),
        "typed_as": lambda q, k: (q[:, None].type_as(k.detach()) + k.to(k.new_empty(0))).tanh(),
        "unsqueezed_in_place": lambda q, k: (q.unsqueeze_(1).repeat(1, TK, 1) + k).tanh(),
        "scaled_add": lambda q, k: torch.add(k, q.unsqueeze(1), alpha=0.5).tanh(),
        "difference": lambda q, k: torch.tanh(q.unsqueeze(1) - k),
        "time_first": lambda q, k: (q + k.transpose(0, 1)).tanh().transpose(0, 1),
        "hidden_first": lambda q, k: (q.T[..., None] + k.permute(2, 0, 1)).tanh().permute(1, 2, 0),
    },
    "score": {
        "einsum": lambda h, v: torch.einsum("bkh,h->bk", h, v),
        "vector_first": lambda h, v: v @ h.transpose(1, 2),
        "bmm": lambda h, v: h.bmm(v.expand(B, H).unsqueeze(2)).squeeze(2),
        "product_sum": lambda h, v: torch.sum(h * v, dim=2),
        "flat_mv": lambda h, v: torch.mv(h.view(-1, H), v).view(B, TK),
        "functional": lambda h, v: F.linear(h, v.view(1, -1)).squeeze(),
        "conv1d": lambda h, v: F.conv1d(h.transpose(1, 2), v.view(1, H, 1))[:, 0],
        "inner": torch.inner,
        "tensordot": lambda h, v: torch.tensordot(h, v, dims=([2], [0])),
        "tensordot_matrix": lambda h, v: torch.tensordot(h, v[:, None], dims=1)[..., 0],
    },
    "weigh": {
        "mask_infinite": lambda x, mask: x.masked_fill(~mask, -math.inf).softmax(-1),
        "mask_in_place": lambda x, mask: F.softmax(x.masked_fill_(mask == 0, -1e10), dim=1),
        "mask_where": lambda x, mask: torch.where(mask, x, torch.full_like(x, -1e10)).softmax(1),
        "mask_where_scalar": lambda x, mask: torch.where(
            mask, x, torch.tensor(-math.inf, dtype=x.dtype)
        ).softmax(1),
        "mask_where_not": lambda x, mask: torch.where(~mask, torch.tensor(-1e9), x).softmax(1),
        "mask_float": lambda x, mask: (x + (1.0 - mask.to(x.dtype)) * -1e9).softmax(1),
        "mask_log": lambda x, mask: torch.softmax(x + mask.to(x.dtype).log(), 1),
        "mask_by_slices": mask_by_slices,
        "mask_after_exp": lambda x, mask: (e := x.exp() * mask) / e.sum(1, keepdim=True),
        "mask_after_softmax": lambda x, mask: (
            (w := torch.softmax(x * mask, -1) * mask) / (w.sum(-1, keepdim=True) + 1e-13)
        ),
        "softmax_by_hand": lambda x, mask: (
            (e := torch.exp(x - x.max(dim=1, keepdim=True)[0])) / e.sum(dim=1, keepdim=True)
        ),
        "softmax_module": lambda x, mask: nn.Softmax(dim=1)(x),
        "softmax_of_old": lambda x, mask: F.softmax(x),  # its axis goes by theirs
        "softmax_module_of_old": lambda x, mask: nn.Softmax()(x[:, None]).squeeze(1),
        "softmax_first_axis": lambda x, mask: F.softmax(x.t(), dim=0).t(),
        "log_softmax": lambda x, mask: F.log_softmax(x, 1).exp(),
        "sharpened": lambda x, mask: torch.softmax(2.0 * x, 1),
        "over_sqrt": lambda x, mask: torch.softmax(x / math.sqrt(H), 1),
        "clipped": lambda x, mask: torch.softmax(10 * torch.tanh(x), 1),
        "smoothed": lambda x, mask: torch.div(w := torch.sigmoid(x), w.sum(1, keepdim=True)),
        "sparsemax": sparsemax,
        "best_three": lambda x, mask: torch.zeros_like(x).scatter(
            1, (best := x.topk(3, dim=1)).indices, best.values.softmax(1)
        ),
    },
}
LEFT = {
    "join": {
        NONE: {
            # An activation that is not served, or not of the sum, or of something else.
            "gelu": lambda q, k: F.gelu(q[:, None] + k),
            "of_each": lambda q, k: torch.tanh(q)[:, None] + torch.tanh(k),
            "layer_norm": lambda q, k: F.layer_norm(q[:, None] + k, (H,)).tanh(),
            "product": lambda q, k: torch.tanh(q[:, None] * k),
            # One key at a time: nothing is broadcast.
            "each_key": lambda q, k: torch.stack([torch.tanh(q + key) for key in k.unbind(1)], 1),
        },
        "is multiplied by a sigmoid": {
            "gated": lambda q, k: torch.tanh(q[:, None] + k) * torch.sigmoid(k),
        },
    },
    "score": {
        "its values are needed by amax": {"max": lambda h, v: (h * v).amax(2)},
        "its values are needed by relu": {"relu_between": lambda h, v: (h * v).relu().sum(2)},
        NO_ROWS: {"vector_per_key": lambda h, v: (h * torch.outer(torch.arange(TK), v)).sum(2)},
    },
}
for part, ways in PARTS.items():
    for reason, named in ({"": ways} | LEFT.get(part, {})).items():
        for name, way in named.items():
            STYLES[f"{part}_{name}"] = Style(partial(Parts, **{part: way}), masked(step), reason)


# ---- as users wrote it


class Keyworded(Additive):
    def forward(self, queries, keys, values, *, mask):
        scores = self.energy(queries, keys).masked_fill(mask[:, None] == 0, float("-inf"))
        return torch.bmm(F.softmax(scores, dim=-1), values)


@forward(masked(shapes((B, TQ, DQ), (B, TK, DK), (B, TK, DV))), attention=Keyworded)
def mask_keyword(self, queries, keys, values, mask):
    return self.attention(queries, keys, values, mask=mask)


@forward(loop, W=free(H, DQ), U=free(H, DK), v=free(1, H), cell=lambda: nn.GRUCell(DV + DK, DQ))
def functional_decoder(self, inputs, state, keys):
    outputs, projected = [], F.linear(keys, self.U)
    for x in inputs.unbind(1):
        hidden = F.tanh(F.linear(state, self.W)[:, None] + projected)
        weights = F.softmax(F.linear(hidden, self.v), dim=1)
        state = self.cell(torch.cat([x, (weights * keys).sum(1)], 1), state)
        outputs.append(state)
    return torch.stack(outputs, 1), state


@forward(shapes((1, B, DQ), (TK, B, DQ)), attn=linear(2 * DQ, H), v=free(H))
def keon(self, hidden, outputs):
    hidden = hidden.repeat(outputs.size(0), 1, 1).transpose(0, 1)
    energy = F.tanh(self.attn(torch.cat([hidden, outputs.transpose(0, 1)], 2))).transpose(1, 2)
    v = self.v.repeat(outputs.size(1), 1).unsqueeze(1)
    return F.relu(F.softmax(torch.bmm(v, energy).squeeze(1), dim=1)).unsqueeze(1)


@forward(shapes((B, DQ, 1), (B, DK, TK)), W=conv(DQ, H), U=conv(DK, H), v=conv(H, 1))
def conv1d_projections(self, query, keys):
    weights = self.v(torch.tanh(self.W(query) + self.U(keys))).softmax(2)
    return (keys * weights).sum(2), weights


class GivenKeys(Additive):
    alphas = None

    def forward(self, query, proj_key, value, mask):
        scores = self.v(torch.tanh(self.W(query) + proj_key)).squeeze(2).unsqueeze(1)
        scores.data.masked_fill_(mask == 0, -float("inf"))
        alphas = F.softmax(scores, dim=-1)
        self.alphas = alphas.detach()
        return torch.bmm(alphas, value), alphas


@forward(masked(shapes((B, 1, DQ), (B, TK, DK))), attention=GivenKeys)
def annotated(self, query, memory, mask):
    return self.attention(query, self.attention.U(memory), memory, mask.unsqueeze(1))


@forward(step)
def session(self, last, items):  # of a recommender, whose weights are the scores
    last = self.W(last).repeat(TK, 1, 1).permute(1, 0, 2)
    scores = self.v(torch.sigmoid(self.U(items) + last)).squeeze(2)
    return torch.matmul(scores.unsqueeze(1), items).squeeze(1), scores


@forward(masked(step))
def session_with_padding(self, last, items, mask):  # which is hidden before the sum
    hidden = torch.sigmoid(self.U(items) + self.W(last).unsqueeze(1))
    scores = self.v(mask.unsqueeze(2).expand_as(hidden) * hidden)
    return torch.sum(scores.expand_as(items) * items, 1)


STYLES["tutorial"] = Style(partial(whole.Tutorial, DK), shapes((B, 1, DK), (B, TK, DK)))
for act in (nn.ReLU, nn.Tanh):
    make = partial(whole.Captioning, DK, DQ, H, act)
    STYLES[f"captioning_{act.__name__}"] = Style(make, shapes((B, TK, DK), (B, DQ)))

# ---- of pairs of a query and a key, and in modules of the user's


def pairs(query, keys):
    return torch.cat([query.unsqueeze(1).expand(-1, keys.size(1), -1), keys], -1)


def on_pairs(m, q, k):
    return attend(m.v(pairs(q, k)).squeeze(-1), k)


def scored(activation=nn.Tanh):
    return nn.Linear(DQ + DK, H), activation(), nn.Linear(H, 1)


class Act(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Net(nn.Sequential):
    """Has layers of torch."""


def called_by_class(m, q, k):
    return attend(nn.Sequential.forward(m.v, m.both(q, k)).squeeze(-1), k)


def channels_first(m, q, k):
    hidden = torch.tanh(torch.bmm(m.W.expand(B, -1, -1), pairs(q, k).transpose(1, 2)))
    weights = torch.bmm(m.v.expand(B, 1, H), hidden).softmax(2)
    return torch.bmm(weights, k).squeeze(1), weights


def matrix(m, q, k):
    return attend((torch.tanh(pairs(q, k) @ m.W) @ m.v).squeeze(-1), k)


add("sequential_on_concat", step, on_pairs, v=lambda: nn.Sequential(*scored()))
add("own_net", step, on_pairs, v=lambda: Net(*scored()))
add("own_activation", step, on_pairs, v=lambda: nn.Sequential(*scored(Act)))
add("called_by_class", step, called_by_class, v=lambda: nn.Sequential(Act(), nn.Linear(H, 1)))
add("channels_first", step, channels_first, W=free(H, DQ + DK), v=free(1, H))
add("matrix", step, matrix, W=free(DQ + DK, H), v=free(H, 1))


# ---- projections, heads and axes


@forward(many, w=free(H, DQ), u=free(H, DK), v=free(H))
def einsum_throughout(self, query, keys):
    q = torch.einsum("bqd,hd->bqh", query, self.w)
    k = torch.einsum("bkd,hd->bkh", keys, self.u)
    scores = torch.einsum("bqkh,h->bqk", torch.tanh(q.unsqueeze(2) + k.unsqueeze(1)), self.v)
    return torch.einsum("bqk,bkd->bqd", torch.softmax(scores, 2), keys)


@forward(masked(many), v=free(HEADS, 1, H // HEADS))
def heads_first(self, query, keys, mask):
    q = self.W(query).view(B, TQ, HEADS, -1).transpose(1, 2)
    k = self.U(keys).view(B, TK, HEADS, -1).transpose(1, 2)
    scores = ((q.unsqueeze(3) + k.unsqueeze(2)).tanh() @ self.v.mT[:, None]).squeeze(-1)
    weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
    return (weights @ k).transpose(1, 2).flatten(2), weights.mean(1)


@forward(step, w=free(DQ, H), u=free(DK, H), b=free(H))
def addmm_projections(self, query, keys):
    q = torch.addmm(self.b, query, self.w)
    k = torch.mm(keys.reshape(-1, DK), self.u).view(B, TK, H)
    return self.look(k + q.view(B, 1, H), keys)


@forward(step, c=free(1))
def addmm_scores(self, query, keys):
    hidden = torch.tanh(self.both(query, keys)).flatten(0, 1)
    return attend(torch.addmm(self.c, hidden, self.v.weight.t()).view(B, TK), keys)


@forward(step, attn=linear(DQ + DK, H))
def sliced_weight(self, query, keys):
    w_q, w_k = self.attn.weight.split([DQ, DK], dim=1)
    return self.look(F.linear(query, w_q, self.attn.bias)[:, None] + F.linear(keys, w_k), keys)


@forward(masked(time_first), v=free(H), g=free(1), b=free(H))
def fairseq_normalised(self, query, value, mask):
    normed = self.g * self.v / torch.norm(self.v)
    both = self.W(query).unsqueeze(0) + self.U(value) + self.b
    scores = (normed * torch.tanh(both)).sum(dim=2).masked_fill_(~mask.t(), float("-inf"))
    scores = F.softmax(scores, dim=0)
    return (scores.unsqueeze(2) * value).sum(dim=0), scores


@forward(shapes((B, TQ, H), (B, TK, DV), (B, TK, H)), v=free(H))
def keras_scale(self, query, value, key):
    scores = torch.sum(self.v * torch.tanh(query[:, :, None] + key[:, None]), dim=-1)
    return torch.matmul(F.softmax(scores, -1), value)


# DA-RNN's second stage: hidden state, cell and keys in one Linear.
@forward(shapes((1, B, DQ), (1, B, DQ), (B, TK, DK)), W=linear(2 * DQ + DK, H))
def three_in_concat(self, hidden, cell, keys):
    hidden, cell = (x.repeat(TK, 1, 1).permute(1, 0, 2) for x in (hidden, cell))
    both = torch.cat((hidden, cell, keys), dim=2).view(-1, 2 * DQ + DK)
    weights = F.softmax(self.v(torch.tanh(self.W(both))).view(-1, TK), dim=1)
    return torch.bmm(weights.unsqueeze(1), keys)[:, 0, :]


@forward(keys_alone, W=linear(DK, 3 * H))
def self_attention(self, x):
    q, k, values = self.W(x).chunk(3, dim=-1)
    return self.look(q.unsqueeze(2) + k.unsqueeze(1), values)


def causal(m, x):
    later = torch.ones(TK, TK, dtype=torch.bool).triu(1)
    return attend(m.energy(x, x).masked_fill(later, -math.inf), x)


def co_attention(m, q, k):
    scores = m.energy(q, k)
    return F.softmax(scores, dim=2) @ k, F.softmax(scores, dim=1).transpose(1, 2) @ q


def two_vectors(m, q, k):
    hops = F.softmax(m.v(torch.tanh(m.both(q, k))), dim=1)
    return torch.bmm(hops.transpose(1, 2), k).flatten(1)


add("two_vectors", step, two_vectors, v=linear(H, 2))
add("causal_self_attention", keys_alone, causal, W=linear(DK, H))
add("co_attention", many, co_attention)
add("scores_only", many, lambda m, q, k: m.v(F.relu(m.both(q, k))))
add("bias_addend", many, lambda m, q, k: m.look(m.bias + m.both(q, k), k), bias=free(H))


@forward(shapes((DQ,), (TK, DK)))
def unbatched(self, query, keys):
    scores = torch.tanh(self.W(query) + self.U(keys)) @ self.v.weight[0]
    return torch.softmax(scores, 0) @ keys


@forward(keys_alone, queries=free(TQ, H))
def learned_queries(self, keys):
    return self.look(self.queries[None, :, None] + self.U(keys)[:, None], keys)


# ---- what is done with scores and weights


@forward(same_size, W=linear(DK, H))
def plus_dot_product(self, query, keys):
    dots = torch.bmm(keys, query.unsqueeze(2)).squeeze(2) / math.sqrt(DK)
    return attend(self.energy(query, keys) + dots, keys)


@forward(step, dropout=lambda: nn.Dropout(0.4))
def dropout_on_weights(self, query, keys):
    weights = self.dropout(F.softmax(self.energy(query, keys), dim=-1))
    return torch.bmm(weights.unsqueeze(1), keys), weights


@forward(step)
def no_grad_keys(self, query, keys):
    with torch.no_grad():
        projected = self.U(keys)
    return self.look(self.W(query).unsqueeze(1) + projected, keys)


@forward(step, temperature=lambda: nn.Parameter(torch.tensor(1.7)))
def temperature(self, query, keys):
    return attend(self.energy(query, keys) / self.temperature, keys)


# ---- images and graphs


@forward(shapes((B, DQ), (B, 3, 6, DK)))
def image_grid(self, query, image):
    scores = self.v(torch.tanh(self.W(query)[:, None, None] + self.U(image)))
    weights = scores.flatten(1).softmax(1).view(B, 3, 6, 1)
    return (weights * image).sum((1, 2)), weights.squeeze(-1)


def edges():
    """From the next two nodes and from the node itself."""
    return sum(torch.eye(TK).roll(shift, 1) for shift in range(3)) > 0


@forward(masked(keys_alone, edges), W=linear(DK, H), a=free(HEADS, H // HEADS))
def gatv2_dense(self, nodes, edges):
    source, target = self.W(nodes).view(B, TK, HEADS, -1), self.U(nodes).view(B, TK, HEADS, -1)
    hidden = F.leaky_relu(source.unsqueeze(1) + target.unsqueeze(2), negative_slope=0.2)
    scores = (hidden * self.a).sum(dim=-1).masked_fill(~edges.unsqueeze(-1), float("-inf"))
    weights = F.softmax(scores, dim=2)
    return F.elu(torch.einsum("bijn,bjnd->bind", weights, source).flatten(2))


# ---- whole models


class Plain(Additive):
    def __init__(self, *sizes, change=lambda module: None):
        super().__init__(*sizes)
        change(self)

    def forward(self, query, keys):
        return attend(self.energy(query, keys), keys)


@forward(lambda draw: (draw(B * STEPS, DQ), draw(B, TK, DK)))
def beams(self, query, keys):
    keys = keys.repeat_interleave(query.size(0) // keys.size(0), dim=0)
    context, weights = attend(self.energy(query, keys), keys)
    return context.view(B, STEPS, DK), weights.view(B, STEPS, TK)


CHANGED = {
    "weight_norm": lambda m: (weight_norm(m.W), weight_norm(m.v)),
    "doubling_hook": lambda m: m.W.register_forward_hook(lambda module, inputs, out: 2 * out),
    "frozen_keys": lambda m: m.U.requires_grad_(False),
    "frozen_score": lambda m: (m.v.requires_grad_(False), m.W.bias.requires_grad_(False)),
}
for name, change in CHANGED.items():
    STYLES[f"changed_{name}"] = Style(partial(Plain, change=change), step)


EQUAL = {
    "batch_and_keys": ((7, DQ), (7, 7, DK), H),
    "queries_and_keys": ((B, 7, DQ), (B, 7, DK), H),
    "keys_and_hidden": ((B, TQ, DQ), (B, 12, DK), 12),
    "batch_and_queries": ((5, 5, DQ), (5, TK, DK), H),
    "all": ((12, 12, 12), (12, 12, 12), 12),
    "one_item_one_query": ((1, 1, DQ), (1, TK, DK), H),
    "one_key": ((B, DQ), (B, 1, DK), H),
}
for name, (query, keys, hidden) in EQUAL.items():
    make = partial(Plain, query[-1], keys[-1], hidden)
    STYLES[f"equal_{name}"] = Style(make, shapes(query, keys), NO_ROWS * (name == "one_key"))


# ---- without a query: scores of one projection, plain or gated


add("self_pooling", keys_alone, lambda m, k: m.look(m.U(k), k))
bag = shapes((23, DK))


def branch(activation):
    return lambda: nn.Sequential(nn.Linear(DK, H), activation(), nn.Dropout())


# CLAM has a row of weights for all of its classes.
@forward(bag, a=branch(nn.Tanh), b=branch(nn.Sigmoid), c=linear(H, 2))
def gated_bag_of_classes(self, h):
    scores = self.c(self.a(h).mul(self.b(h)))
    weights = F.softmax(torch.transpose(scores, 1, 0), dim=1)
    return torch.mm(weights, h), weights


# AttentionDeepMIL; a batch of bags here, with padding.
@forward(masked(keys_alone), a=branch(nn.Tanh), b=branch(nn.Sigmoid), c=linear(H, 1))
def gated_bags(self, h, mask):
    scores = (self.b(h) * self.a(h)) @ self.c.weight.t() + self.c.bias
    weights = scores.masked_fill(~mask.unsqueeze(-1), float("-inf")).softmax(1).transpose(2, 1)
    return torch.bmm(weights, h).squeeze(1)


# A question's features and an image's, joined: the gate is of both.
@forward(step, fc=linear(DQ + DK, H), gate=linear(DQ + DK, H))
def gated_pairs(self, query, keys):
    x = pairs(query, keys)
    return attend(self.v(self.fc(x).tanh() * self.gate(x).sigmoid()).squeeze(-1), keys)


# Words of a sentence, time first, against a context vector.
@forward(shapes((TK, B, DK)), word=linear(DK, H), context=free(H))
def words_against_a_context(self, h):
    weights = torch.softmax(torch.tanh(self.word(h)) @ self.context, 0)
    return (weights.unsqueeze(-1) * h).sum(0), weights


# A news recommender's; the exponentials are divided by hand.
@forward(keys_alone, matrix=free(DK, H), b=free(H), query=free(H, 1))
def news_against_a_vector(self, x):
    temp = torch.tanh(torch.matmul(x, self.matrix) + self.b)
    weights = torch.exp(torch.matmul(temp, self.query).squeeze(-1))
    weights = weights / weights.sum(1, keepdim=True)
    return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


# An attentional factorisation machine's.
@forward(keys_alone)
def products_by_relu(self, x):
    weights = torch.softmax((self.U(x).relu() * self.v.weight[0]).sum(2), 1)
    return (weights.unsqueeze(2) * x).sum(1)


# Statistics of a speaker's frames (B,C,T), with weights for every channel.
@forward(shapes((B, DK, TK)), inner=conv(DK, H), outer=conv(H, DK))
def attentive_statistics(self, x):
    weights = torch.softmax(self.outer(torch.tanh(self.inner(x))), dim=2)
    mean = torch.sum(weights * x, dim=2)
    variance = torch.sum(weights * x**2, dim=2) - mean**2
    return torch.cat((mean, torch.sqrt(variance.clamp(min=1e-4))), dim=1)


# The gate is of something else.
@forward(lambda draw: (draw(B, TK, DK), draw(B, TK, DK)), NONE, other=linear(DK, H))
def gated_by_another(self, keys, others):
    return attend(self.v(self.U(keys).tanh() * self.other(others).sigmoid()).squeeze(-1), keys)


# ---- left: something else is computed, or the same in pieces


# Under a checkpoint's hooks on what is saved, calls are the user's own: it compares them.
@forward(step, "gradients are saved otherwise within it")
def checkpointed(self, query, keys):
    return attend(checkpoint(self.energy, query, keys, use_reentrant=False), keys)


# The first GAT: the activation comes after the sum over the hidden axis.
@forward(masked(keys_alone, edges), NONE, other=linear(H, 1))
def gat_first(self, nodes, edges):
    h = self.U(nodes)
    scores = F.leaky_relu(self.v(h) + self.other(h).transpose(1, 2), 0.2)
    return attend(scores.masked_fill(~edges, -9e15), h)


# A product in the concatenation, which is an addend of the keys.
@forward(same_size, attn=linear(3 * DK, H))
def concat_with_product(self, query, keys):
    query = query.unsqueeze(1).expand_as(keys)
    return self.look(self.attn(torch.cat([query, keys, query * keys], -1)), keys)


# A transducer's joint network: logits over a vocabulary for each pair.
@forward(many, "many vectors", out=linear(H, 23))
def transducer_joint(self, predicted, encoded):
    return self.out(torch.tanh(self.U(encoded).unsqueeze(2) + self.W(predicted).unsqueeze(1)))


add("dot_product", many, lambda m, q, k: attend(m.W(q) @ m.U(k).transpose(1, 2), k), NONE)
# Networks of the layers of pooling, whose softmax is over classes.
for act in (torch.tanh, torch.relu):
    classes = lambda m, k, act=act: m.out(act(m.U(k))).softmax(-1)  # noqa: E731
    add(f"classes_{act.__name__}", keys_alone, classes, NONE, out=linear(H, 5))


# Both addends have the axis of the keys.
@forward(shapes((B, TK, DQ), (B, TK, DK)), NONE)
def aligned_streams(self, one, two):
    return self.look(self.W(one) + self.U(two), two)
