"""A pointer network for tours: the scores of additive attention are the output.

At each step the decoder points at the next city (Vinyals et al. 2015; Bello et al. 2016). There are
no values and no context: `scores` gives the scores alone, clipped to 10 tanh(score), of a memory
that projects the cities once for all steps. Those that were visited are masked, and a log-softmax
makes them a policy. It imitates the tours that always go to the nearest city.
"""

import torch
from torch import nn

import bahdanau_fast as bf

CITIES, SIZE = 10, 64


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(2, SIZE)
        self.encoder = nn.GRU(SIZE, SIZE, batch_first=True)
        self.decoder = nn.GRU(SIZE, SIZE, batch_first=True)
        self.attention = bf.AdditiveAttention(SIZE, SIZE, SIZE)

    def point(self, queries, memory, visited):
        """Log-probabilities (B,Tq,CITIES) of the next city, where `visited` is not True."""
        scores = self.attention.scores(queries, memory, clip=10.0)
        return scores.masked_fill(visited, -torch.inf).log_softmax(-1)

    def forward(self, cities, tours):
        """Log-probabilities (B,CITIES - 1,CITIES) of all steps of known tours, in one call."""
        embedded = self.embedding(cities)
        keys, state = self.encoder(embedded)
        queries, _ = self.decoder(
            embedded.gather(1, tours[:, :-1, None].expand(-1, -1, SIZE)), state
        )
        seen = nn.functional.one_hot(tours[:, :-1], CITIES).cumsum(1) > 0
        return self.point(queries, self.attention.memory(keys), seen)

    @torch.no_grad()
    def tour(self, cities, sample=False):
        """Tours (B,CITIES) from city 0, greedily or sampled."""
        embedded = self.embedding(cities)
        keys, state = self.encoder(embedded)
        memory = self.attention.memory(keys)
        rows = torch.arange(len(cities))
        city = torch.zeros_like(rows)
        visited = torch.zeros(len(cities), 1, CITIES, dtype=torch.bool)
        tour = [city]
        for _ in range(CITIES - 1):
            visited[rows, 0, city] = True
            query, state = self.decoder(embedded[rows, city, None], state)
            log_probs = self.point(query, memory, visited)[:, 0]
            city = log_probs.exp().multinomial(1)[:, 0] if sample else log_probs.argmax(1)
            tour.append(city)
        return torch.stack(tour, dim=1)


def nearest_neighbour(cities):
    """Tours (B,CITIES) that go from city 0 to the nearest city not seen."""
    distances = torch.cdist(cities, cities)
    rows = torch.arange(len(cities))
    tour = [torch.zeros_like(rows)]
    for _ in range(CITIES - 1):
        distances[rows, :, tour[-1]] = torch.inf
        tour.append(distances[rows, tour[-1]].argmin(1))
    return torch.stack(tour, dim=1)


def length(cities, tours):
    """Mean length of closed tours."""
    path = cities.gather(1, tours[..., None].expand(-1, -1, 2))
    return (path - path.roll(1, dims=1)).norm(dim=-1).sum(1).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Pointer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(1, 151):
        cities = torch.rand(128, CITIES, 2)
        tours = nearest_neighbour(cities)
        loss = nn.functional.nll_loss(model(cities, tours).flatten(0, 1), tours[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}")

    cities = torch.rand(500, CITIES, 2)
    greedy = model.tour(cities)
    assert greedy.sort(1).values.equal(torch.arange(CITIES).expand(500, -1))  # each city once
    of_random = length(cities, torch.rand(500, CITIES).argsort(1))
    of_sampled, of_greedy = length(cities, model.tour(cities, sample=True)), length(cities, greedy)
    assert of_greedy < of_sampled < of_random
    print(f"lengths: random {of_random:.2f}, sampled {of_sampled:.2f}, greedy {of_greedy:.2f}, "
          f"nearest neighbour {length(cities, nearest_neighbour(cities)):.2f}")  # fmt: skip
