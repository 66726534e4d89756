"""Captions: attention over the regions of a picture, with ReLU inside (Xu et al. 2015 in PyTorch).

The popular code for "Show, Attend and Tell" scores a region with w_v . relu(W_q h + W_k a + b):
`activation="relu"`. A memory projects the regions once for all words. The pictures hold two
coloured shapes somewhere on a grid of regions, and the caption names them in the order of reading:
"red cross blue square".
"""

import torch
from torch import nn

import bahdanau_fast as bf

GRID, TILE, SIZE = 4, 6, 64
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
SHAPES = {
    "square": torch.ones(TILE, TILE),
    "cross": torch.eye(TILE) + torch.eye(TILE).flip(0),
    "bar": torch.eye(TILE)[2].repeat(TILE, 1),
}
WORDS = ["<bos>", *COLOURS, *SHAPES]


def pictures(count):
    """Pictures (B,3,GRID*TILE,GRID*TILE), captions (B,4), and the regions that they name (B,2)."""
    regions = torch.rand(count, GRID * GRID).argsort(1)[:, :2].sort(1).values
    colours = torch.randint(len(COLOURS), (count, 2))
    shapes = torch.randint(len(SHAPES), (count, 2))
    pixels = torch.tensor(list(COLOURS.values()), dtype=torch.float)[colours]  # (B,2,3)
    things = torch.stack([*SHAPES.values()])[shapes]  # (B,2,TILE,TILE)
    things = pixels[..., None, None] * things[:, :, None]
    tiles = 0.1 * torch.randn(count, GRID * GRID, 3, TILE, TILE)  # noise
    tiles[torch.arange(count)[:, None], regions] += things
    tiles = tiles.view(count, GRID, GRID, 3, TILE, TILE).permute(0, 3, 1, 4, 2, 5)
    captions = torch.stack((1 + colours, 1 + len(COLOURS) + shapes), dim=2).flatten(1)
    return tiles.reshape(count, 3, GRID * TILE, GRID * TILE), captions, regions


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Conv2d(3, SIZE, TILE, stride=TILE)  # one feature vector for each region
        self.place = nn.Parameter(0.1 * torch.randn(GRID * GRID, SIZE))
        self.attention = bf.AdditiveAttention(SIZE, SIZE, SIZE, bias=True, activation="relu")
        self.embedding = nn.Embedding(len(WORDS), SIZE)
        self.cell = nn.LSTMCell(2 * SIZE, SIZE)
        self.output = nn.Linear(SIZE, len(WORDS))

    def forward(self, picture, caption=None):
        """Logits (B,4,words) and weights (B,4,regions); with a caption, by teacher forcing."""
        regions = self.see(picture).flatten(2).transpose(1, 2).relu() + self.place  # (B,16,SIZE)
        memory = self.attention.memory(regions)
        hidden = cell = regions.mean(1)
        word = torch.zeros(len(picture), dtype=torch.long)  # <bos>
        logits, looked = [], []
        for t in range(4):
            context = self.attention.attend(hidden, memory)  # (B,SIZE)
            both = torch.cat((self.embedding(word), context), dim=1)
            hidden, cell = self.cell(both, (hidden, cell))
            logits.append(self.output(hidden))
            looked.append(self.attention.attention_weights)  # (B,16)
            word = logits[-1].argmax(1) if caption is None else caption[:, t]
        return torch.stack(logits, dim=1), torch.stack(looked, dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Captioner()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(1, 151):
        picture, caption, _ = pictures(32)
        logits, _ = model(picture, caption)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), caption.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}")

    picture, caption, regions = pictures(500)
    with torch.no_grad():
        logits, weights = model(picture)
    found = logits.argmax(-1)
    print(f"{(found == caption).all(1).float().mean():.0%} of new captions are right")
    looked = weights[:, ::2].argmax(-1) == regions
    print(f"looks at the shape that it names in {looked.float().mean():.0%} of the cases")
    print("for instance:", " ".join(WORDS[i] for i in found[0]))
