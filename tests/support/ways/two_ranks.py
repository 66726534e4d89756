"""What two gloo processes do for test_ways.py: ``python -m ways.two_ranks RANK FILE``.

Each way prints a line per mode, "right: WAY, MODE", or what is wrong.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ways.modes import play, variants
from ways.table import WAYS
from ways.way import MODES


def main():
    rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    for way in (way for way in WAYS if way.ranks == 2):
        for mode in (mode for mode in MODES if mode not in way.without):
            wrong = [
                f"{name}: {line}"
                for name, options in variants(way, mode)
                for line in play(way, mode, meeting.parent, **options)
            ]
            print(*(wrong or [f"right: {way.how}, {mode}"]), sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
