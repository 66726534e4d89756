"""The chapter on Bahdanau attention of https://d2l.ai, with one name changed.

before:  self.attention = d2l.AdditiveAttention(num_hiddens, dropout)
after:   self.attention = bf.AdditiveAttention(num_hiddens, dropout)

The rest is as in the chapter: the decoder attends at each step with its last state. It learns to
translate "the red cats see dogs" into "les chats rouges voient chiens".
"""

import importlib.util
import itertools
import random

import torch
from torch import nn

import bahdanau_fast as bf

ADJECTIVES = {"red": "rouges", "black": "noirs", "white": "blancs", "green": "verts", "": ""}
NOUNS = {"cats": "chats", "dogs": "chiens", "birds": "oiseaux", "horses": "chevaux"}
VERBS = {"see": "voient", "like": "aiment", "follow": "suivent"}
PAIRS = [
    (f"the {a} {n} {v} {m}", f"les {NOUNS[n]} {ADJECTIVES[a]} {VERBS[v]} {NOUNS[m]}")
    for a, n, v, m in itertools.product(ADJECTIVES, NOUNS, VERBS, NOUNS)
]
STEPS, HELD_OUT, EPOCHS = 6, 40, 15


class Seq2SeqEncoder(nn.Module):
    def __init__(self, vocab_size, embed_size, num_hiddens, num_layers):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size, num_hiddens, num_layers, batch_first=True)

    def forward(self, X):  # (B,T) tokens to outputs (B,T,H) and a state (L,B,H)
        return self.rnn(self.embedding(X))


class Seq2SeqAttentionDecoder(nn.Module):
    def __init__(self, vocab_size, embed_size, num_hiddens, num_layers, dropout=0.0):
        super().__init__()
        self.attention = bf.AdditiveAttention(num_hiddens, dropout)  # the line that changed
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size + num_hiddens, num_hiddens, num_layers, batch_first=True)
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def forward(self, X, state):  # (B,T) tokens to logits (B,T,vocab)
        enc_outputs, hidden, enc_valid_lens = state
        outputs, self.attention_weights = [], []
        for x in self.embedding(X).split(1, dim=1):
            query = hidden[-1].unsqueeze(1)  # (B,1,H)
            context = self.attention(query, enc_outputs, enc_outputs, enc_valid_lens)
            out, hidden = self.rnn(torch.cat((context, x), dim=-1), hidden)
            outputs.append(out)
            self.attention_weights.append(self.attention.attention_weights)
        return self.dense(torch.cat(outputs, dim=1)), [enc_outputs, hidden, enc_valid_lens]


def read(texts):
    """Sentences to tokens (B,STEPS), their lengths (B,), and the words."""
    texts = [[*text.split(), "<eos>"] for text in texts]
    words = ["<pad>", "<bos>", *sorted(set(itertools.chain(*texts)))]
    tokens = [[words.index(word) for word in text] + [0] * (STEPS - len(text)) for text in texts]
    return torch.tensor(tokens), torch.tensor([len(text) for text in texts]), words


torch.manual_seed(0)
random.Random(0).shuffle(PAIRS)
(X, lens, english), (Y, _, french) = map(read, zip(*PAIRS, strict=True))
inputs = torch.cat((torch.ones_like(Y[:, :1]), Y[:, :-1]), dim=1)  # <bos>, then teacher forcing
encoder = Seq2SeqEncoder(len(english), 32, 32, 1)
decoder = Seq2SeqAttentionDecoder(len(french), 32, 32, 1)
decoder(inputs[:1], [*encoder(X[:1]), lens[:1]])  # as in the course, sizes come from a first call
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
for epoch in range(EPOCHS):
    for rows in torch.randperm(len(X) - HELD_OUT).split(50):
        logits, _ = decoder(inputs[rows], [*encoder(X[rows]), lens[rows]])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), Y[rows].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")

X, Y, state = X[-HELD_OUT:], Y[-HELD_OUT:], [*encoder(X[-HELD_OUT:]), lens[-HELD_OUT:]]
found, weights = torch.ones(HELD_OUT, 1, dtype=torch.long), []  # <bos>
for _ in range(STEPS):
    logits, state = decoder(found[:, -1:], state)
    found = torch.cat((found, logits.argmax(-1)), dim=1)
    weights += decoder.attention_weights
right = ((found[:, 1:] == Y) | (Y == 0)).all(1).float().mean()
print(f"{right:.0%} of {HELD_OUT} sentences never seen are translated right")
row = lens[-HELD_OUT:].argmax()  # one with an adjective
source, target = [english[i] for i in X[row]], [french[i] for i in found[row, 1:]]
print(" ".join(source), "->", " ".join(target))
if importlib.util.find_spec("matplotlib"):
    picture = torch.cat(weights, dim=1)[row].view(1, 1, STEPS, STEPS)
    figure = bf.seq2seq.show_heatmaps(picture, "English", "French")
    figure.axes[0].set_xticks(range(STEPS), source, rotation=60)
    figure.axes[0].set_yticks(range(STEPS), target)
    figure.savefig("d2l_chapter.png")
