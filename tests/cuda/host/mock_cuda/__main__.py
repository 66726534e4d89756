"""``PYTHONPATH=tests/cuda/host python -m mock_cuda``: what a call costs the host.

Launches and other calls of the CUDA runtime for each call of an operator, and the time that C++ and
torch take beside them.
"""

import time

import torch
from entry_points import attend, attend_backward

from . import launches, mock

SIZES = {"step": (64, 1, 50, 512), "beams": (8, 6, 400, 512), "many queries": (2, 40, 300, 64)}
CALLS = 200


def main():
    gpu = mock()
    gpu.new_gpu()
    print(f"{'call':<24}{'launches':>9}{'others':>8}{'host, us':>10}")
    for name, (batch, queries, keys, hidden) in SIZES.items():
        shapes = (batch, queries, hidden), (batch, keys, hidden), (batch, keys, hidden), (1, hidden)
        a, c, values, w_v = (torch.randn(shape).bfloat16() for shape in shapes)
        inputs = gpu.operator, a, c, values, w_v, None
        context, weights = attend(*inputs)
        for way, function, rest in (
            ("forward", attend, ()), ("backward", attend_backward, (weights, context, weights))
        ):  # fmt: skip
            times = []
            for _ in range(CALLS):
                gpu.calls()
                start = time.perf_counter()
                function(*inputs, *rest)
                times.append(time.perf_counter() - start)
            calls = gpu.calls()
            made = len(launches(calls))
            row = f"{name + ', ' + way:<24}{made:>9}{len(calls) - made:>8}"
            print(f"{row}{1e6 * min(times):>10.1f}")


if __name__ == "__main__":
    main()
