"""Error against fp64 by magnitude of the inputs: the table of docs/how-it-works.md.

Run ``python -m benchmarks.accuracy``. Queries and keys are drawn normal, times the magnitude;
w_v is that of a fresh ``Linear(H, 1)``. The error is the largest relative error of an attention
weight, against the reference computed in fp64 from the same rounded inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bahdanau_fast import backends, reference
from bahdanau_fast.memory import project

from .contestants.providers import attend_projected
from .printing.tables import markdown

MAGNITUDES = (1e-6, 1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BATCH, QUERIES, KEYS, HIDDEN = 4, 32, 64, 256  # above the size that is computed in fp64 anyway


def _worst(weights: Tensor, exact: Tensor) -> float:
    return float(((weights.double() - exact) / exact).abs().max())


def errors(dtype: torch.dtype, magnitude: float, backend: str) -> tuple[float, float]:
    """Largest relative error of a weight: ours, and eager PyTorch's in the same dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries = (draw(BATCH, QUERIES, HIDDEN) * magnitude).to(dtype)
    keys = (draw(BATCH, KEYS, HIDDEN) * magnitude).to(dtype)
    values = draw(BATCH, KEYS, 8).to(dtype)
    w_v = ((torch.rand(HIDDEN, generator=generator) * 2 - 1) * HIDDEN**-0.5).to(dtype)
    _, exact = reference.attend(queries.double(), keys.double(), values.double(), w_v.double())
    _, eager = reference.attend(queries, keys, values, w_v)
    memory = project(keys, backends.keeps_table(backend, keys))
    _, ours = attend_projected(backend, queries, memory, values, w_v, None)
    return _worst(ours, exact), _worst(eager, exact)


def main() -> None:
    """Print the table in Markdown."""
    backend = backends.resolve(torch.device("cpu"))
    print(f"backend {backend}; ours / eager\n")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    cells = []
    for magnitude in MAGNITUDES:
        of_dtypes = (errors(dtype, magnitude, backend) for dtype in DTYPES)
        cells.append([f"{magnitude:g}", *("{:.1e} / {:.1e}".format(*each) for each in of_dtypes)])
    print("\n".join(markdown(["magnitude", *names], cells)))


if __name__ == "__main__":
    with torch.no_grad():
        main()
