"""The two matrix products behind ``Linear``: MKL, which PyTorch takes, and oneDNN.

Run ``python -m benchmarks.projection``: fp32, interleaved, medians. The third column is what
bahdanau_fast takes for that size on this machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bahdanau_fast import projection

from .timing.measure import interleave

# rows, input features, hidden units
SIZES = (
    (64, 32, 32),
    (1, 512, 512),
    (16, 512, 512),
    (64, 512, 512),
    (512, 512, 512),
    (3200, 512, 512),
    (1152, 256, 256),
    (10240, 512, 128),
)


def main() -> None:
    """Print the table."""
    print("| rows, D, H     | F.linear, ms | ours, ms | ratio (p20-p80)    | taken  |")
    print("|----------------|--------------|----------|--------------------|--------|")
    for rows, features, hidden in SIZES:
        x, weight = torch.randn(rows, features), torch.randn(hidden, features)
        taken = "oneDNN" if projection._pays(x, weight) else "MKL"
        calls = {
            "mkl": lambda x=x, weight=weight: F.linear(x, weight),
            "ours": lambda x=x, weight=weight: projection.linear(x, weight),
        }
        with torch.no_grad():
            for call in calls.values():
                call()
            timings = interleave(calls, seconds=1.0)
        mkl, ours = (timings.time(name).median * 1e3 for name in ("mkl", "ours"))
        ratio = timings.ratio("mkl", "ours")
        spread = f"{ratio.median:.2f}x ({ratio.p20:.2f}-{ratio.p80:.2f})"
        sizes = f"{rows},{features},{hidden}"
        print(f"| {sizes:<14} | {mkl:<12.4f} | {ours:<8.4f} | {spread:<18} | {taken:<6} |")


if __name__ == "__main__":
    main()
