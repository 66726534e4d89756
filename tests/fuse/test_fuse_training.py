"""A whole model of others, trained on sentence pairs before and after ``fuse``."""

import copy

import peers
import torch

import bahdanau_fast as bf
from bahdanau_fast.seq2seq.data import dates
from benchmarks.family import Translator, train

STEPS, BATCH, SIZE = 50, 16, 32


def test_joeynmt_trains_to_the_same_losses():
    peers.load("joeynmt.decoders", "RecurrentDecoder")
    torch.manual_seed(0)
    model = Translator(SIZE)
    fused = copy.deepcopy(model)
    assert [entry.family for entry in bf.fuse(fused).fused] == ["JoeyNMT"]
    pairs = [(example.text, example.iso) for example in dates.generate(200)]
    before, after = (train(each, pairs, STEPS, BATCH) for each in (model, fused))
    assert before[-1] < 0.8 * before[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 1e-4
