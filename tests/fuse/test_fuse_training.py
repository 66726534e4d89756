"""A whole model of others, trained on sentence pairs before and after ``fuse``."""

import copy

import peers
import torch
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.seq2seq.data import dates

STEPS, BATCH, SIZE, VOCABULARY = 50, 16, 32, 128


class Encoder(nn.GRU):
    output_size = SIZE


class Translator(nn.Module):
    """Letters to letters: an embedding, a GRU, and JoeyNMT's recurrent decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE, padding_idx=0)
        self.encoder = Encoder(SIZE, SIZE, batch_first=True)
        self.decoder = peers.load("joeynmt.decoders", "RecurrentDecoder")(
            emb_size=SIZE, hidden_size=SIZE, encoder=self.encoder, vocab_size=VOCABULARY
        )

    def loss(self, source, target):
        states, last = self.encoder(self.embedding(source))
        mask = (source > 0).unsqueeze(1)
        given, wanted = self.embedding(target[:, :-1]), target[:, 1:]
        scores, *_ = self.decoder(
            trg_embed=given,
            encoder_output=states,
            encoder_hidden=last[-1],
            src_mask=mask,
            unroll_steps=given.shape[1],
            trg_mask=None,
        )
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0)


def letters(texts):
    """(B,T), 1 to begin and 2 to end, then zeros."""
    rows = [torch.tensor([1, *(min(ord(c), VOCABULARY - 1) for c in text), 2]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(model, pairs):
    """The loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for step in range(STEPS):
        at = step * BATCH % (len(pairs) - BATCH)
        sources, targets = zip(*pairs[at : at + BATCH], strict=True)
        optimizer.zero_grad()
        loss = model.loss(letters(sources), letters(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare(pairs):
    """The losses of 50 steps before and after ``fuse``, from the same weights."""
    torch.manual_seed(0)
    model = Translator()
    fused = copy.deepcopy(model)
    assert [entry.family for entry in bf.fuse(fused).fused] == ["JoeyNMT"]
    return train(model, pairs), train(fused, pairs)


def test_joeynmt_trains_to_the_same_losses():
    examples = dates.generate(200)
    before, after = compare([(example.text, example.iso) for example in examples])
    assert before[-1] < 0.8 * before[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 1e-4
