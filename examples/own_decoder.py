"""A decoder of your own: keys are projected once, and the beams of a search are queries.

It learns to spell words backwards. `memory` projects the encoder's outputs, for all steps and all
beams; `attend` takes (B,K,D) queries, one for each of K beams, so nothing is copied for a beam.
"""

import torch
from torch import nn

import bahdanau_fast as bf

PAD, BOS, EOS, VOCAB = 0, 1, 2, 29  # then the letters
LONGEST, SIZE = 8, 64


def words(count, seed):
    """Random words (B,LONGEST), padded, their lengths (B,), and the words backwards with <eos>."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(3, LONGEST + 1, (count,), generator=generator)
    source = torch.randint(3, VOCAB, (count, LONGEST), generator=generator)
    source[torch.arange(LONGEST) >= lens[:, None]] = PAD
    places = lens[:, None] - 1 - torch.arange(LONGEST + 1)  # -1 is <eos>, below is padding
    target = source.gather(1, places.clamp(min=0))
    target = target.masked_fill(places == -1, EOS).masked_fill(places < -1, PAD)
    return source, lens, target


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, SIZE)
        self.encoder = nn.GRU(SIZE, SIZE // 2, bidirectional=True, batch_first=True)
        self.attention = bf.AdditiveAttention(SIZE, SIZE, SIZE)  # key_size, query_size, num_hiddens
        self.cell = nn.GRUCell(2 * SIZE, SIZE)
        self.output = nn.Linear(SIZE, VOCAB)

    def read(self, source, lens):
        """(B,T) letters to a memory of them and the first state (B,SIZE)."""
        outputs, hidden = self.encoder(self.embedding(source))
        return self.attention.memory(outputs, valid_lens=lens), torch.cat((*hidden,), dim=-1)

    def step(self, letters, state, memory):
        """Letters (B,K) and states (B,K,SIZE) of K beams to log-probabilities and new states."""
        context = self.attention.attend(state, memory)  # (B,K,SIZE)
        both = torch.cat((context, self.embedding(letters)), dim=-1)
        state = self.cell(both.flatten(0, 1), state.flatten(0, 1)).view_as(state)
        return self.output(state).log_softmax(-1), state


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(1, steps + 1):
        source, lens, target = words(64, seed=step)
        memory, state = model.read(source, lens)
        state, letters, log_probs = state[:, None], torch.full((64, 1), BOS), []
        for truth in target.split(1, dim=1):
            found, state = model.step(letters, state, memory)
            log_probs.append(found)
            letters = truth  # teacher forcing
        log_probs = torch.cat(log_probs, dim=1).flatten(0, 1)
        loss = nn.functional.nll_loss(log_probs, target.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss:.3f}")


@torch.no_grad()
def search(model, source, lens, width):
    """The best of `width` beams for each word, (B,LONGEST + 1), and its log-probability (B,)."""
    memory, state = model.read(source, lens)
    rows = torch.arange(len(source))[:, None]
    state = state[:, None].expand(-1, width, -1)
    letters = torch.full((len(source), width), BOS)
    total = torch.full((len(source), width), -torch.inf)
    total[:, 0] = 0.0  # the beams are still alike: one of them counts
    history = letters[..., None]
    for _ in range(LONGEST + 1):
        log_probs, state = model.step(letters, state, memory)
        over = (letters == EOS) | (letters == PAD)  # goes on with padding, which costs nothing
        log_probs[over] = torch.tensor([0.0] + [-torch.inf] * (VOCAB - 1))
        total, best = (total[..., None] + log_probs).flatten(1).topk(width)
        beams, letters = best // VOCAB, best % VOCAB
        state = state[rows, beams]
        history = torch.cat((history[rows, beams], letters[..., None]), 2)
    return history[:, 0, 1:], total[:, 0]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Speller()
    train(model, steps=120)
    source, lens, target = words(500, seed=0)
    for width in (1, 5):
        found, log_probs = search(model, source, lens, width)
        right = (found == target).all(1).float().mean()
        print(f"{width} beams: {right:.1%} of new words right, mean log P {log_probs.mean():.3f}")
