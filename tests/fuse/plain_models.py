"""Models without additive attention, in which ``fuse`` must find nothing and break nothing.

``PLAIN`` gives for each name what makes the model, and its inputs from ``draw(*shape)``.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

B, T, D, WORDS = 4, 7, 12, 19


def tokens(draw):
    return ((torch.arange(B * T).view(B, T) * 5) % WORDS,)


def images(draw):
    return (draw(B, 3, 16, 16),)


def sequence(draw):
    return (draw(B, T, D),)


def rows(draw):
    return (draw(B, D),)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels, out):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out))
        self.two = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Conv2d(channels, out, 1, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.two(self.relu(self.one(x)))
        out += self.short(x)
        return self.relu(out)


def resnet():
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(Residual(3, 8), Residual(8, 16), pool, nn.Linear(16, 10))


class Transformer(nn.Module):
    """Its attention and feed-forward layers by hand, with positions added to words."""

    def __init__(self, act):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(T, D))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.feed = nn.Sequential(nn.Linear(D, 2 * D), act(), nn.Linear(2 * D, D))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(D) for _ in range(2)), nn.Linear(D, 1)

    def forward(self, x):
        x = self.words(x) + self.positions
        q, k, v = (y.view(B, T, 3, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = F.softmax(q @ k.transpose(2, 3) / 2 + torch.full((T, T), -1e9).triu(1), -1)
        x = self.norms[0](x + self.out((weights @ v).transpose(1, 2).reshape(B, T, D)))
        x = self.norms[1](x + self.feed(x))
        return self.head(F.relu(x)), x


def torch_encoder():
    layer = nn.TransformerEncoderLayer(D, 3, 2 * D, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, D), nn.LSTM(D, 16, 2, batch_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x):
        hidden, state = self.rnn(self.words(x))
        return F.log_softmax(self.out(hidden), -1), state


def discriminator():
    convs = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True))
    more = nn.Sequential(nn.Conv2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
    return nn.Sequential(convs, more, nn.Flatten(), nn.Linear(256, 1), nn.Sigmoid())


def regression():
    hidden = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(hidden, nn.Linear(16, 1))


class Vae(nn.Module):
    """The noise is an input."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 16), nn.Linear(5, 16)
        self.mean, self.spread, self.out = nn.Linear(16, 5), nn.Linear(16, 5), nn.Linear(16, D)

    def forward(self, x, noise):
        hidden = torch.relu(self.encoder(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + noise * torch.exp(0.5 * spread)
        return torch.sigmoid(self.out(torch.tanh(self.decoder(z)))), mean, spread


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1)
        self.up, self.join = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, 1, 1)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        down = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(down, 2)))
        return self.out(F.relu(self.join(torch.cat([self.up(deep), down], 1))))


class GatedTcn(nn.Module):
    """Dilated causal convolutions, tanh times sigmoid, under a condition of the whole series."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=2**i) for i in range(2))
        self.condition, self.out = nn.Linear(D, 2 * D), nn.Conv1d(D, 1, 1)

    def forward(self, x, condition):
        for i, conv in enumerate(self.convs):
            both = conv(F.pad(x, (2**i, 0))) + self.condition(condition).unsqueeze(2)
            tanh, gate = both.chunk(2, 1)
            x = x + torch.tanh(tanh) * torch.sigmoid(gate)
        return self.out(x)


def quietly(make):
    """Without the warnings that torch gives of what is deprecated."""

    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(D, 16)), nn.Tanh(), nn.Linear(16, 1))


def traced():
    inner = nn.Sequential(nn.Linear(D, 16), nn.ReLU())
    return nn.Sequential(torch.jit.trace(inner, torch.zeros(B, D)), nn.Linear(16, 1))


class Quantised(nn.Module):
    """Linear layers in int8, which know float32 alone and no gradient, after one that is not."""

    def __init__(self):
        super().__init__()
        layers = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
        self.first = nn.Linear(D, D)
        self.layers = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear})

    def forward(self, x):
        x = self.first(x)
        return self.layers(x.detach().float()).to(x.dtype) + x


PLAIN = {
    "resnet": (resnet, images),
    "transformer_relu": (lambda: Transformer(nn.ReLU), tokens),
    "transformer_gelu": (lambda: Transformer(nn.GELU), tokens),
    "torch_encoder": (torch_encoder, sequence),
    "language_model": (LanguageModel, tokens),
    "discriminator": (discriminator, images),
    "regression": (regression, rows),
    "vae": (Vae, lambda draw: (draw(B, D), draw(B, 5))),
    "unet": (Unet, images),
    "gated_tcn": (GatedTcn, lambda draw: (draw(B, D, T), draw(B, D))),
    "scripted": (quietly(scripted), rows),
    "traced": (quietly(traced), rows),
    "quantised": (quietly(Quantised), rows),
}
