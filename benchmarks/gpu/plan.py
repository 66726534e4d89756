"""The experiments of an hour, the most telling first."""

from __future__ import annotations

from .constants import SWEEPS
from .runner import Experiment

WHOLE, LAB = f"{__package__}.whole", f"{__package__}.lab:constant"
CUDA, TRITON = "tests/cuda/gpu/test_", "tests/triton/kernels/test_"
FIRST = f"{CUDA}persistent_on_gpu.py"  # it has the first cooperative launch
# Other tests, and how many processes share them: compiling takes most of their time.
PARTS = {
    **{f"{CUDA}{name}.py": 2 for name in ("on_gpu", "graphs")},
    **{f"{TRITON}kernels_parity.py": 4, f"{TRITON}fused_models.py": 2, f"{TRITON}waves.py": 2},
    **{f"{TRITON}{name}.py": 1 for name in ("compiled", "decoder", "launches")},
    **{f"{TRITON}{name}.py": 1 for name in ("precision", "ranges")},
}
SECONDS = 110.0  # of such a process
# Rows of benchmarks/gpu/user.py.
FELT = {
    "user, training in float32": ("training step .*float32", 60),
    "user, training in bfloat16": ("training step .*bfloat16", 60),
    "user, host": ("host,", 30),
    "user, decoding": ("greedy decode", 45),
    "user, modules": ("module call|Tacotron step|captioner step", 45),
}


def experiments(dry: bool) -> list[Experiment]:
    """All of them; in a dry run some at a time, and nothing is compiled beforehand."""
    constants = dict.fromkeys(sweep.constant for sweep in SWEEPS)
    in_triton = [
        name
        for name in constants
        if any(w.backend == "triton" for s in SWEEPS if s.constant == name for w in s.ways.values())
    ]
    found = [
        Experiment("machine", 60, f"{WHOLE}:machine"),
        Experiment("check", 60, f"{WHOLE}:check"),
        Experiment(FIRST, 90, f"{WHOLE}:suite", (FIRST, 80.0)),
        *(
            Experiment(
                f"{path}, {part + 1} of {count}",
                *(SECONDS, f"{WHOLE}:suite", (path, SECONDS - 10, part, count), True),
            )
            for path, count in PARTS.items()
            for part in range(1 if dry else count)
        ),
        *(Experiment(f"compile {n}", SECONDS, LAB, (n,), True, "warm") for n in in_triton),
        *(Experiment(n, limit, f"{WHOLE}:user", (rows,)) for n, (rows, limit) in FELT.items()),
        *(Experiment(name, 25, LAB, (name,)) for name in constants),
    ]
    if not dry:
        return found
    users = (("TRITON_INTERPRET", "0"),)  # the processor serves its tensors
    first, *others = (e._replace(mode="dry", variables=users) for e in found if e.mode == "timed")
    lab = (("TRITON_INTERPRET", "1"),)
    return [
        first._replace(seconds=300),  # it builds the mock runtime
        *(e._replace(beside=True, variables=lab if e.function == LAB else users) for e in others),
    ]
