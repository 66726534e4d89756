"""Attention modules that no package index has, written again here.

``Tutorial`` (Wa, Ua, Va): the PyTorch tutorial's, which many copy. ``Captioning``: of "a PyTorch
tutorial to image captioning". ``tutorial()`` and ``inputs()`` are small ones.
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


def tutorial():
    torch.manual_seed(0)
    return Tutorial(16)


def inputs(length=9):
    torch.manual_seed(1)
    return torch.randn(3, 1, 16), torch.randn(3, length, 16)
