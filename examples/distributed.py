"""Training on several processes: each has a part of the batch, gradients are averaged.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py

On the CPU with gloo, on GPUs with NCCL. The attention is an ordinary module to DDP. The task is to
look up: each source holds pairs of a key and a value, and the query is one of the keys.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bahdanau_fast as bf

NAMES, PAIRS, SIZE, BATCH = 20, 8, 64, 64


class LookUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(NAMES, SIZE)
        self.values = nn.Embedding(NAMES, SIZE)
        self.attention = bf.AdditiveAttention(SIZE, SIZE, SIZE)  # sizes given: DDP needs weights
        self.output = nn.Linear(SIZE, NAMES)

    def forward(self, asked, names, values):
        """Logits (B,NAMES) of the value that stands beside the name asked for."""
        context = self.attention(self.names(asked), self.names(names), self.values(values))
        return self.output(context)


def batch(generator):
    names = torch.rand(BATCH, NAMES, generator=generator).argsort(1)[:, :PAIRS]  # all different
    values = torch.randint(NAMES, (BATCH, PAIRS), generator=generator)
    return names[:, 0], names, values, values[:, 0]


def same_everywhere(tensors):
    """Whether all processes hold the same bits."""
    mine = torch.cat([tensor.flatten() for tensor in tensors])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def main():
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun --standalone --nproc-per-node 2 {__file__}")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(LookUp().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    generator = torch.Generator().manual_seed(rank)  # data of its own
    for step in range(1, 41):
        asked, names, values, truth = (x.to(device) for x in batch(generator))
        loss = nn.functional.cross_entropy(model(asked, names, values), truth)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients of all processes
        if not same_everywhere([p.grad for p in model.parameters()]):
            raise SystemExit(f"step {step}: the gradients of the processes differ")
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss:.3f}")
    if rank == 0:
        print(f"gradients were equal on {dist.get_world_size()} processes")
    time.sleep(0.1)  # gloo's threads let go of the last tensors: pytorch/pytorch#190489
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
