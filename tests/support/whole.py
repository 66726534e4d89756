"""Modules and whole models whose attention ``fuse`` has to find, as their users write them.

``Tutorial`` (Wa, Ua, Va): the PyTorch tutorial's, which many copy; ``tutorial()`` and ``inputs()``
are small ones. ``Captioning``: of "a PyTorch tutorial to image captioning".

``Las`` listens and spells, with location-aware attention. ``Tacotron`` decodes mel frames.
``Pointer`` has the formula in its decoder's loop. ``Translator`` has a conditional GRU, and its
attention keeps projected keys, as JoeyNMT's does.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

B, H = 4, 16


class Tutorial(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


class Captioning(nn.Module):
    def __init__(self, encoder_dim, decoder_dim, attention_dim, act=nn.ReLU):
        super().__init__()
        self.encoder_att = nn.Linear(encoder_dim, attention_dim)
        self.decoder_att = nn.Linear(decoder_dim, attention_dim)
        self.full_att = nn.Linear(attention_dim, 1)
        self.act = act()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, encoder_out, decoder_hidden):
        both = self.encoder_att(encoder_out) + self.decoder_att(decoder_hidden).unsqueeze(1)
        alpha = self.softmax(self.full_att(self.act(both)).squeeze(2))
        return (encoder_out * alpha.unsqueeze(2)).sum(dim=1), alpha


def tutorial():
    torch.manual_seed(0)
    return Tutorial(16)


def inputs(length=9):
    torch.manual_seed(1)
    return torch.randn(3, 1, 16), torch.randn(3, length, 16)


def is_padding(lens, length):
    return torch.arange(length, device=lens.device) >= lens.unsqueeze(1)


class LocationSensitive(nn.Module):
    def __init__(self, state, memory, hidden, filters=4, kernel=7, inputs=2):
        super().__init__()
        self.query_layer = nn.Linear(state, hidden, bias=False)
        self.memory_layer = nn.Linear(memory, hidden, bias=False)
        self.location_conv = nn.Conv1d(inputs, filters, kernel, padding=kernel // 2, bias=False)
        self.location_dense = nn.Linear(filters, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def energies(self, state, processed, both):
        location = self.location_dense(self.location_conv(both).transpose(1, 2))
        query = self.query_layer(state.unsqueeze(1))
        return self.v(torch.tanh(query + location + processed)).squeeze(-1)

    def forward(self, state, memory, processed, both, pad):
        energies = self.energies(state, processed, both)
        energies.masked_fill_(pad, -float("inf"))
        weights = F.softmax(energies, dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


class ByItself(LocationSensitive):
    """Projects the memory, in each step."""

    def forward(self, memory, lens, state, previous):
        processed, pad = self.memory_layer(memory), is_padding(lens, memory.size(1))
        return super().forward(state, memory, processed, previous.unsqueeze(1), pad)


class Speller(nn.Module):
    def __init__(self, tokens, memory, hidden):
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(tokens, hidden)
        self.cell = nn.LSTMCell(hidden + memory, hidden)
        self.attention = ByItself(hidden, memory, hidden, inputs=1)
        self.out = nn.Linear(hidden + memory, tokens)

    def forward(self, memory, lens, given):
        h = c = memory.new_zeros(memory.size(0), self.hidden)
        context = memory.new_zeros(memory.size(0), memory.size(2))
        weights = (~is_padding(lens, memory.size(1))).to(memory.dtype) / lens.unsqueeze(1)
        logits = []
        for token in self.embedding(given).unbind(1):
            h, c = self.cell(torch.cat([token, context], -1), (h, c))
            context, weights = self.attention(memory, lens, h, weights)
            logits.append(self.out(torch.cat([h, context], -1)))
        return torch.stack(logits, 1)


class Las(nn.Module):
    def __init__(self, features=6, tokens=7):
        super().__init__()
        self.listener = nn.LSTM(features, H // 2, batch_first=True, bidirectional=True)
        self.speller = Speller(tokens, H, H)

    def forward(self, frames, lens, given):
        return self.speller(self.listener(frames)[0], lens, given)


def las_batch(seed):
    """A token is the loudest feature of a frame."""
    length = 7 + seed % 3
    frames = torch.randn(B, length, 6, generator=torch.Generator().manual_seed(seed))
    target = 1 + frames.argmax(-1)[:, :4]
    given = F.pad(target[:, :-1], (1, 0))
    return (frames, torch.tensor([length, 5, length - 1, 1]), given), target


class Tacotron(nn.Module):
    def __init__(self, memory=12, mels=5, hidden=H):
        super().__init__()
        self.hidden = hidden
        narrow = (nn.Linear(mels, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, hidden))
        self.prenet = nn.Sequential(*narrow, nn.ReLU(), nn.Dropout(0.5))
        self.attention_rnn = nn.LSTMCell(hidden + memory, hidden)
        self.attention_layer = LocationSensitive(hidden, memory, hidden)
        self.decoder_rnn = nn.LSTMCell(hidden + memory, hidden)
        self.projection = nn.Linear(hidden + memory, mels)
        self.stop = nn.Linear(hidden + memory, 1)

    def forward(self, memory, lens, mels):
        h = c = h2 = c2 = memory.new_zeros(memory.size(0), self.hidden)
        context = memory.new_zeros(memory.size(0), memory.size(2))
        weights = total = memory.new_zeros(memory.shape[:2])
        processed, pad = self.attention_layer.memory_layer(memory), is_padding(lens, memory.size(1))
        frames, stops = [], []
        for frame in self.prenet(F.pad(mels[:, :-1], (0, 0, 1, 0))).unbind(1):
            h, c = self.attention_rnn(torch.cat((frame, context), -1), (h, c))
            h = F.dropout(h, 0.1, self.training)
            both = torch.cat((weights.unsqueeze(1), total.unsqueeze(1)), dim=1)
            context, weights = self.attention_layer(h, memory, processed, both, pad)
            total = total + weights
            h2, c2 = self.decoder_rnn(torch.cat((h, context), -1), (h2, c2))
            found = torch.cat((h2, context), dim=1)
            frames.append(self.projection(found))
            stops.append(self.stop(found).squeeze(-1))
        return torch.stack(frames, 1), torch.stack(stops, 1)


def tacotron_batch(seed):
    """A token is one of twelve, and sounds as a wave of its own; after the last one it stops."""
    length = 6 + seed % 3
    text = torch.randint(12, (B, length), generator=torch.Generator().manual_seed(seed))
    mels = torch.sin(text.unsqueeze(-1) + torch.arange(5.0))[:, :4]
    lens = torch.tensor([length, 4, 3, 1])
    return (F.one_hot(text, 12).float(), lens, mels), (mels, is_padding(lens, 4).float())


class PointerDecoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.start = nn.Parameter(torch.randn(hidden))
        self.cell = nn.LSTMCell(hidden, hidden)
        self.W1 = nn.Linear(hidden, hidden, bias=False)
        self.W2 = nn.Linear(hidden, hidden, bias=False)
        self.vt = nn.Linear(hidden, 1, bias=False)

    def forward(self, encoded, state, order):
        visited = torch.zeros_like(order, dtype=torch.bool)
        given, log_probs = self.start.expand(len(order), -1), []
        for chosen in order.split(1, dim=1):
            state = self.cell(given, state)
            u = self.vt(torch.tanh(self.W1(encoded) + self.W2(state[0]).unsqueeze(1))).squeeze(-1)
            log_probs.append(F.log_softmax(u.masked_fill(visited, float("-inf")), dim=-1))
            visited = visited.scatter(1, chosen, 1)
            at = chosen.unsqueeze(-1).expand(-1, -1, encoded.size(2))
            given = encoded.gather(1, at).squeeze(1)
        return torch.stack(log_probs, 1)


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(2, H, batch_first=True)
        self.decoder = PointerDecoder(H)

    def forward(self, points, order):
        encoded, (h, c) = self.encoder(points)
        # torch 2.10 exports these states with one dimension too many.
        state = h.flatten(0, -3)[-1], c.flatten(0, -3)[-1]
        return self.decoder(encoded, state, order)


def pointer_batch(seed):
    """Points, to be visited from left to right."""
    points = torch.rand(B, 4 + seed % 3, 2, generator=torch.Generator().manual_seed(seed))
    order = points[..., 0].argsort(-1)
    return (points, order), order


class BahdanauAttention(nn.Module):
    def __init__(self, hidden, key, query):
        super().__init__()
        self.key_layer = nn.Linear(key, hidden, bias=False)
        self.query_layer = nn.Linear(query, hidden, bias=False)
        self.energy_layer = nn.Linear(hidden, 1, bias=False)
        self.proj_keys = None

    def compute_proj_keys(self, keys):
        self.proj_keys = self.key_layer(keys)

    def forward(self, query, mask, values):
        energy = self.energy_layer(torch.tanh(self.query_layer(query) + self.proj_keys))
        scores = energy.squeeze(2).unsqueeze(1)
        scores = torch.where(mask > 0, scores, scores.new_full([1], float("-inf")))
        alphas = F.softmax(scores, dim=-1)
        return alphas @ values, alphas


class Translator(nn.Module):
    def __init__(self, tokens=11):
        super().__init__()
        self.embed = nn.Embedding(tokens, H, padding_idx=0)
        self.encoder = nn.GRU(H, H // 2, batch_first=True, bidirectional=True)
        self.ask, self.take = nn.GRUCell(H, H), nn.GRUCell(H, H)
        self.attention = BahdanauAttention(H, H, H)
        self.att_vector_layer = nn.Linear(2 * H, H)
        self.dropout = nn.Dropout(0.1)
        self.output_layer = nn.Linear(H, tokens, bias=False)

    def forward(self, source, given):
        memory, last = self.encoder(self.embed(source))
        self.attention.compute_proj_keys(memory)
        state, mask, vectors = torch.cat([*last], -1), (source != 0).unsqueeze(1), []
        for token in self.dropout(self.embed(given)).unbind(1):
            state = self.ask(token, state)
            context, _ = self.attention(query=state.unsqueeze(1), mask=mask, values=memory)
            state = self.take(context.squeeze(1), state)
            both = torch.cat([state.unsqueeze(1), context], dim=2)
            vectors.append(torch.tanh(self.att_vector_layer(self.dropout(both))))
        return self.output_layer(torch.cat(vectors, 1))


def translator_batch(seed):
    """The source, backwards."""
    length = 6 + seed % 3
    source = torch.randint(1, 11, (B, length), generator=torch.Generator().manual_seed(seed))
    source = source.masked_fill(is_padding(torch.tensor([length, 5, 3, 1]), length), 0)
    target = source.flip(1)[:, :4]
    return (source, F.pad(target[:, :-1], (1, 0))), target


def of_tokens(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def of_frames(outputs, target):
    stops = F.binary_cross_entropy_with_logits(outputs[1], target[1])
    return F.mse_loss(outputs[0], target[0]) + stops


class Whole(NamedTuple):
    """A model, its arguments and target by a seed, its loss, and submodules with the formula."""

    kind: type[nn.Module]
    batch: Callable
    judge: Callable
    fused: tuple[str, ...]

    def make(self, seed=0):
        torch.manual_seed(seed)
        return self.kind()

    def loss(self, model, batch):
        inputs, target = batch
        return self.judge(model(*inputs), target)


MODELS = {
    "las": Whole(Las, las_batch, of_tokens, ("speller.attention",)),
    "tacotron": Whole(Tacotron, tacotron_batch, of_frames, ("attention_layer",)),
    "pointer": Whole(Pointer, pointer_batch, of_tokens, ("decoder",)),
    "translator": Whole(Translator, translator_batch, of_tokens, ("attention",)),
}
