"""A decoder like Tacotron 2's: frames of speech from phonemes, by location-sensitive attention.

`LocationAttention` sees where earlier frames looked (the last weights, and the sum of all), so it
can move along the text. The speech is synthetic: a phoneme has a spectrum of its own, which grows
for the two or three frames that it lasts.
"""

import torch
from torch import nn

import bahdanau_fast as bf

PHONEMES, TEXT, MELS, SIZE = 12, 6, 20, 64
SPECTRA = torch.rand(PHONEMES, MELS, generator=torch.Generator().manual_seed(1))


def speech(count, seed):
    """Phonemes (B,TEXT), frames (B,T,MELS), and the place in the text (B,T), -1 at the end."""
    text = torch.randint(PHONEMES, (count, TEXT), generator=torch.Generator().manual_seed(seed))
    lasts = 2 + text % 2
    ends = lasts.cumsum(1)
    time = torch.arange(3 * TEXT + 1).expand(count, -1)
    place = torch.searchsorted(ends, time.contiguous(), right=True)
    at = place.clamp(max=TEXT - 1)
    since = time - (ends - lasts).gather(1, at)
    over = (place == TEXT)[..., None]
    frames = (SPECTRA[text.gather(1, at)] * (1 + since[..., None]) / 2).masked_fill(over, 0.0)
    return text, frames, place.masked_fill(over[..., 0], -1)


class Synthesizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(PHONEMES, SIZE)
        self.encoder = nn.GRU(SIZE, SIZE // 2, bidirectional=True, batch_first=True)
        self.prenet = nn.Sequential(nn.Linear(MELS, SIZE), nn.ReLU())
        self.rnn = nn.LSTMCell(2 * SIZE, SIZE)
        self.attention = bf.LocationAttention(SIZE, SIZE, SIZE, channels=8, kernel_size=7, inputs=2)
        self.output = nn.Linear(2 * SIZE, MELS + 1)  # a frame, and whether the speech is over

    def forward(self, text, frames=None, most=3 * TEXT + 1):
        """Frames (B,T,MELS), ends (B,T), weights (B,T,TEXT); from true frames, or from its own."""
        encoded, _ = self.encoder(self.embedding(text))
        memory = self.attention.memory(encoded)  # for all frames
        context = encoded.new_zeros(len(text), SIZE)
        state = context, context
        previous = total = encoded.new_zeros(len(text), 1, TEXT)
        frame, outputs, weights = encoded.new_zeros(len(text), MELS), [], []
        for t in range(most):
            state = self.rnn(torch.cat((self.prenet(frame), context), dim=1), state)
            location = torch.cat((previous, total), dim=1)  # (B,2,TEXT)
            context = self.attention.attend(state[0], memory, location)  # (B,SIZE)
            previous = self.attention.attention_weights[:, None]
            total = total + previous
            outputs.append(self.output(torch.cat((state[0], context), dim=1)))
            weights.append(previous)
            frame = outputs[-1][:, :MELS] if frames is None else frames[:, t]
        outputs = torch.stack(outputs, dim=1)
        return outputs[..., :MELS], outputs[..., MELS], torch.cat(weights, dim=1)


def far_off(weights, place):
    """The guided attention loss of Tachibana et al. 2017: attention strays from the diagonal."""
    time = torch.arange(weights.shape[1]) / (place >= 0).sum(1, keepdim=True)  # 0 to 1
    distance = time[..., None] - torch.arange(TEXT) / TEXT
    return (weights * (1 - torch.exp(-12 * distance**2)))[place >= 0].sum(-1).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Synthesizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, 81):
        text, frames, place = speech(16, seed=step)
        found, ends, weights = model(text, frames)
        loss = nn.functional.mse_loss(found, frames) + far_off(weights, place)
        loss = loss + nn.functional.binary_cross_entropy_with_logits(ends, (place < 0).float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")

    text, frames, place = speech(200, seed=0)
    with torch.no_grad():
        _, _, weights = model(text)  # from its own frames
    looked = (weights.argmax(-1) == place)[place >= 0].float().mean()
    print(f"looks at the phoneme that sounds in {looked:.0%} of the frames of new texts")
