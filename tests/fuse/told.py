"""Attention modules that no package index has, written again here.

``Tutorial`` (Wa, Ua, Va): the PyTorch tutorial's, which many copy. ``Captioning``: of "a PyTorch
tutorial to image captioning". ``Gnmt``: of GNMT in NVIDIA's examples. ``tutorial()`` and
``inputs()`` are small ones.
"""

import torch
from torch import nn


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


class Gnmt(nn.Module):
    def __init__(self, query_size, key_size, num_units, normalize, batch_first):
        super().__init__()
        self.normalize, self.batch_first = normalize, batch_first
        self.linear_q = nn.Linear(query_size, num_units, bias=False)
        self.linear_k = nn.Linear(key_size, num_units, bias=False)
        self.linear_att = nn.Parameter(torch.randn(num_units))
        self.mask = None
        if normalize:
            self.normalize_scalar = nn.Parameter(torch.full((1,), 2.0))
            self.normalize_bias = nn.Parameter(torch.randn(num_units))

    def set_mask(self, context_len, context):
        places = torch.arange(context.size(1 if self.batch_first else 0), device=context.device)
        self.mask = places >= context_len.unsqueeze(1)

    def forward(self, query, keys):
        if not self.batch_first:
            keys = keys.transpose(0, 1)
            query = query.transpose(0, 1) if query.dim() == 3 else query
        single = query.dim() == 2
        query = query.unsqueeze(1) if single else query
        both = self.linear_q(query).unsqueeze(2) + self.linear_k(keys).unsqueeze(1)
        vector = self.linear_att
        if self.normalize:
            both = both + self.normalize_bias
            vector = vector / vector.norm() * self.normalize_scalar
        scores = torch.tanh(both).matmul(vector)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask.unsqueeze(1), -65504.0)
        weights = torch.softmax(scores, dim=-1)
        context = torch.bmm(weights, keys)
        if single:
            return context.squeeze(1), weights.squeeze(1)
        if self.batch_first:
            return context, weights
        return context.transpose(0, 1), weights.transpose(0, 1)


def tutorial():
    torch.manual_seed(0)
    return Tutorial(16)


def inputs(length=9):
    torch.manual_seed(1)
    return torch.randn(3, 1, 16), torch.randn(3, length, 16)
