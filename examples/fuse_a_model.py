"""A model of somebody else, made faster without a change of its code: `bf.fuse`.

The translator below is written as tutorials write it (many of them go back to one of TensorFlow's):
`W1`, `W2` and `V`, keys projected again at every step, scores with an axis of one at the end.
`fuse` finds the attention by what it computes, whatever the names are.
"""

import copy
import time

import torch
import torch.nn.functional as F
from torch import nn

import bahdanau_fast as bf


class Encoder(nn.Module):
    def __init__(self, vocab_size, embedding_dim, enc_units):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.gru = nn.GRU(embedding_dim, enc_units, batch_first=True)

    def forward(self, x):
        output, state = self.gru(self.embedding(x))
        return output, state.squeeze(0)


class BahdanauAttention(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.W1 = nn.Linear(units, units)
        self.W2 = nn.Linear(units, units)
        self.V = nn.Linear(units, 1)

    def forward(self, query, values, mask):
        hidden_with_time_axis = query.unsqueeze(1)
        score = self.V(torch.tanh(self.W1(hidden_with_time_axis) + self.W2(values)))
        score = score.masked_fill(mask.unsqueeze(2) == 0, -1e9)
        attention_weights = F.softmax(score, dim=1)
        context_vector = attention_weights * values
        return context_vector.sum(dim=1), attention_weights


class Decoder(nn.Module):
    def __init__(self, vocab_size, embedding_dim, dec_units):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.gru = nn.GRU(embedding_dim + dec_units, dec_units, batch_first=True)
        self.fc = nn.Linear(dec_units, vocab_size)
        self.attention = BahdanauAttention(dec_units)

    def forward(self, x, hidden, enc_output, mask):
        context_vector, attention_weights = self.attention(hidden, enc_output, mask)
        x = torch.cat([context_vector.unsqueeze(1), self.embedding(x)], dim=-1)
        output, state = self.gru(x, hidden.unsqueeze(0))
        return self.fc(output.squeeze(1)), state.squeeze(0), attention_weights


class Translator(nn.Module):
    def __init__(self, vocab_size=500, embedding_dim=64, units=256):
        super().__init__()
        self.encoder = Encoder(vocab_size, embedding_dim, units)
        self.decoder = Decoder(vocab_size, embedding_dim, units)

    def forward(self, src, trg):
        enc_output, hidden = self.encoder(src)
        mask = src != 0
        outputs = []
        for t in range(trg.shape[1]):
            output, hidden, _ = self.decoder(trg[:, t : t + 1], hidden, enc_output, mask)
            outputs.append(output)
        return torch.stack(outputs, dim=1)


def train_step(model, src, trg):
    """Milliseconds of a forward and a backward pass, and the loss."""
    start = time.perf_counter()
    model.zero_grad()
    loss = F.cross_entropy(model(src, trg[:, :-1]).flatten(0, 1), trg[:, 1:].flatten())
    loss.backward()
    return 1e3 * (time.perf_counter() - start), loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    theirs = Translator()
    ours = copy.deepcopy(theirs)
    src, trg = torch.randint(1, 500, (8, 150)), torch.randint(1, 500, (8, 26))
    src[:4, 100:] = 0  # padding

    report = bf.fuse(ours, (src, trg))  # the line to add
    print(report)
    difference = (ours(src, trg) - theirs(src, trg)).abs().max()
    print(f"outputs differ by at most {difference:.1e}")
    runs = [(train_step(theirs, src, trg), train_step(ours, src, trg)) for _ in range(4)][1:]
    before, after = (sorted(run[i][0] for run in runs)[1] for i in (0, 1))  # medians
    print(f"losses: {runs[0][0][1]:.6f} and {runs[0][1][1]:.6f}")
    print(f"a training step: {before:.0f} ms before, {after:.0f} ms after: {before / after:.1f}x")
