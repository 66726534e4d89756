"""Small translators and their sources, for the tests of greedy decoding."""

import torch
from torch import nn

from bahdanau_fast.seq2seq import EncoderDecoder, Seq2SeqAttentionDecoder, Seq2SeqEncoder

V, E, H, B, TK, STEPS = 23, 6, 11, 9, 7, 12


def model(cell="gru", layers=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    encoder = Seq2SeqEncoder(V, E, H, layers, cell=cell)
    made = EncoderDecoder(encoder, Seq2SeqAttentionDecoder(V, E, H, layers, 0.3, cell)).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)
    return made


def sources(seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, V, (B, TK), generator=generator)
    return tokens, torch.tensor([7, 1, 3, 0, 7, 2, 6, 5, 4])
