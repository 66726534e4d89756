"""``make gpu-report``: tests and benchmarks on the GPU at hand, in less than ten minutes.

make has built the kernels. This runs their parity tests on the GPU, a memory checker over a few of
the tests, and the benchmarks; it writes ``<gpu>-<date>.json`` and prints the tables.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 480  # with the build, ten minutes


def _no_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA or ROCm device is visible"


@dataclass(frozen=True)
class GpuCase:
    """One row of the report.

    Attributes:
        shape: from :mod:`benchmarks.workloads.shapes`.
        task: of the providers.
        train: forward and backward.
        dtype: name in torch.
        rivals: compiled providers beside the eager ones; each takes seconds to compile.
    """

    shape: Any
    task: str
    train: bool = False
    dtype: str = "bfloat16"
    rivals: tuple[str, ...] = ()

    def __str__(self) -> str:
        way = "forward + backward" if self.train else "forward"
        return f"{self.shape}, {self.task}, {way}, {self.dtype}"


def cases() -> list[GpuCase]:
    """The shapes with compiled rivals first, then the list of uses."""
    from .workloads.shapes import LIST, STEPS_ON_MEMORY, Shape

    by_name = {shape.name: shape for shape in (*LIST, *STEPS_ON_MEMORY)}
    wide = Shape("step-256", 256, 1, 400, 512)
    overhead = ("compiled", "compiled reduce-overhead")
    tuned = ("compiled", "compiled tuned")
    rows = [
        GpuCase(by_name["step-64"], "step", rivals=overhead),
        GpuCase(wide, "step", rivals=overhead),
        GpuCase(by_name["parallel-16"], "projected", rivals=tuned),
        GpuCase(by_name["parallel-32"], "projected", dtype="float16", rivals=("compiled",)),
        GpuCase(by_name["parallel-32"], "projected", True, "float16"),
        GpuCase(by_name["parallel-4"], "projected", True, rivals=("compiled",)),
        GpuCase(by_name["parallel-4"], "projected", True, "float32"),
        GpuCase(wide, "projected", True),
        GpuCase(wide, "full"),
    ]
    for shape in (*LIST, *STEPS_ON_MEMORY[1:]):
        task = "step" if shape.queries == 1 else "projected"
        rows.append(GpuCase(shape, task))
    # Of rows that differ in their rivals alone, the first stays.
    return list({str(row): row for row in reversed(rows)}.values())[::-1]


def _providers(case: GpuCase) -> list[Any]:
    import torch

    from bahdanau_fast import backends

    from .contestants.baselines import compiled
    from .contestants.providers import PROVIDERS, Provider, _rewrites

    modes: dict[str, dict[str, Any]] = {
        "compiled reduce-overhead": {"mode": "reduce-overhead"},
        "compiled tuned": {"mode": "max-autotune-no-cudagraphs"},
    }
    chosen = [p for p in PROVIDERS if not p.on_demand and p.group != "compiled"]
    for name in case.rivals:
        options = modes.get(name, {})

        def wrap(function: Callable[..., Any], options: dict[str, Any] = options) -> Any:
            tuned = options.get("mode", "").startswith("max-autotune")
            torch._inductor.config.coordinate_descent_tuning = tuned
            return compiled(function, **options)

        chosen.append(Provider(name, "compiled", _rewrites(wrap)))
    if backends.why_not("cuda") is None and backends.why_not("triton") is None:
        chosen += [beside(p, "triton") for p in chosen if p.group == "ours"]
    return [provider for provider in chosen if case.task in provider.builders]


def beside(provider: Any, backend: str) -> Any:
    """A provider on another backend than the one that auto takes."""
    from bahdanau_fast import backends

    def on_backend(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def built(inputs: Any) -> Any:
            with backends.use(backend):
                runnable = build(inputs)

            def forward() -> Any:
                with backends.use(backend):
                    return runnable.forward()

            return replace(runnable, forward=forward)

        return built

    builders = {task: on_backend(build) for task, build in provider.builders.items()}
    return replace(provider, name=f"{provider.name}, {backend}", builders=builders)


def _inputs(case: GpuCase, device: Any) -> Any:
    import torch

    from .workloads.shapes import draw

    drawn, dtype = draw(case.shape), getattr(torch, case.dtype)
    moved = {}
    for field in fields(drawn):
        tensor = getattr(drawn, field.name)
        if tensor is not None:
            tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
        moved[field.name] = tensor
    if drawn.values is drawn.keys:
        moved["values"] = moved["keys"]
    return replace(drawn, **moved)


def _bytes(case: GpuCase) -> int:
    """Bytes that a step reads: projected keys and values, once."""
    size = 4 if case.dtype == "float32" else 2
    return size * case.shape.batch * case.shape.keys * (case.shape.hidden + case.shape.value_size)


def measure(case: GpuCase, stopwatch: Any, roofs: dict[str, float]) -> dict[str, Any]:
    """Times of every provider: called, replayed from a graph, and replayed with a cold L2."""
    import torch

    from .timing.measure import captured, prepare

    inputs = _inputs(case, stopwatch.device)
    calls: dict[str, Callable[[], Any]] = {}
    skipped: dict[str, str] = {}
    too_large = 2 * case.shape.features * (3 if case.train else 1) > 40e9
    inputs.require_grad(case.train)
    with torch.set_grad_enabled(case.train):
        for provider in _providers(case):
            if provider.group == "eager" and too_large:
                skipped[provider.name] = "(B,Tq,Tk,H) is too large"
                continue
            try:
                runnable = provider.build(case.task, inputs)
                call = prepare(runnable, case.train, inputs.grad_context)
                call()
                calls[provider.name] = call
            except Exception as error:
                skipped[provider.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        result: dict[str, Any] = {"case": str(case), "skipped": skipped}
        result["called"] = _spreads(stopwatch.interleave(calls))
        graphs = {}
        for name, call in calls.items():
            graph = captured(call)
            if isinstance(graph, str):
                skipped[f"{name}, graph"] = graph[:200]
            else:
                graphs[name] = graph
        if graphs:
            result["graph"] = _spreads(stopwatch.interleave(graphs))
            result["cold"] = _spreads(stopwatch.interleave(graphs, cold=True))
    if case.task == "step":
        for state in ("graph", "cold"):
            for name, (median, *_) in result.get(state, {}).items():
                if name.startswith("ours"):
                    share = _bytes(case) / median / roofs["read"]
                    result[f"{state} share of read bandwidth"] = share
    return result


def _spreads(timings: Any) -> dict[str, tuple[float, float, float]]:
    found = {}
    for name in timings.samples:
        spread = timings.time(name)
        found[name] = (spread.median, spread.p20, spread.p80)
    return found


def _run(command: Sequence[str], seconds: float, **variables: str) -> dict[str, Any]:
    """Run a command; its exit code, time and last lines."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds,
            env={**os.environ, **variables},
        )  # fmt: skip
    except subprocess.TimeoutExpired as slow:
        said = slow.stdout.decode(errors="replace") if isinstance(slow.stdout, bytes) else ""
        return {
            "command": " ".join(command),
            "problem": f"not done in {seconds:.0f} s",
            "end": said.splitlines()[-12:],
        }
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {
        "command": " ".join(command),
        "exit": done.returncode,
        "seconds": time.monotonic() - start,
        "end": lines[-12:],
    }


def _tests() -> list[str]:
    """The folders of tests of the GPU backends that can be loaded here."""
    from bahdanau_fast import backends

    folders = {"cuda": "cuda/gpu", "triton": "triton/kernels"}
    there = [folder for name, folder in folders.items() if backends.why_not(name) is None]
    return [str(ROOT / "tests" / folder) for folder in there]


def parity(seconds: float) -> dict[str, Any]:
    """The tests of the GPU backends."""
    return _run([sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *_tests()], seconds)


def sanitizer(seconds: float) -> dict[str, Any]:
    """A memory checker over a few tests; for the CUDA C++ kernels, checkers of races and reads too.

    The latter two do not understand how Triton orders accesses. Every tensor gets memory of its
    own; otherwise an overrun could end in another tensor of the same allocator and go unnoticed.
    """
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    tool = shutil.which("compute-sanitizer") or shutil.which(usual)
    if tool is None:
        return {"problem": "compute-sanitizer is not installed"}
    results: dict[str, Any] = {}
    for check in ("memcheck", "racecheck", "initcheck"):
        tests = [path for path in _tests() if check == "memcheck" or path.endswith("cuda/gpu")]
        if not tests:
            continue
        few = [*tests, "-k", "every_kernel or splits_of", "-p", "no:cacheprovider"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", *few]
        # Races are checked in our kernels alone; reads need to know what torch's kernels wrote.
        ours = ["--kernel-regex", "kns=bahdanau_fast"] if check == "racecheck" else []
        command = [tool, "--tool", check, *ours, "--error-exitcode", "7", *pytest]
        results[check] = _run(command, seconds / 3, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return results


def peaks(device: Any) -> dict[str, float]:
    """Peak memory of forward and backward over inputs, outputs and gradients, (4,128,128,512)."""
    import torch

    from .contestants.providers import by_name
    from .workloads.shapes import MANY_QUERIES

    found = {}
    for name in ("d2l eager", "ours op"):
        inputs = _inputs(GpuCase(MANY_QUERIES[0], "projected", dtype="float32"), device)
        inputs.require_grad(True)
        runnable = by_name(name).build("projected", inputs)
        torch.autograd.grad(runnable.forward()[0], runnable.leaves, inputs.grad_context)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        context, weights = runnable.forward()
        grads = torch.autograd.grad(context, runnable.leaves, inputs.grad_context)
        needed = sum(t.nbytes for t in (*runnable.leaves, context, weights, *grads))
        growth = torch.cuda.max_memory_allocated() - before
        found[name] = (growth + sum(t.nbytes for t in runnable.leaves)) / needed
    return found


def machine() -> dict[str, str]:
    """The machine with its GPU."""
    import torch

    from .timing.machine import machine as host

    where = host()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        where["gpu"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        where["driver"] = _run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 20
        )["end"][-1]
    if importlib.util.find_spec("triton"):
        import triton

        where["triton"] = triton.__version__
    where["cuda"] = torch.version.cuda or torch.version.hip or "none"
    if os.environ.get("BAHDANAU_FAST_COMMIT"):
        where["commit"] = os.environ["BAHDANAU_FAST_COMMIT"]
    return where


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Microseconds by case and provider: called / from a graph / from a graph with a cold L2."""
    names = sorted({name for row in rows for name in row.get("called", {})})
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = []
        for name in names:
            states = (row.get(state, {}).get(name) for state in ("called", "graph", "cold"))
            cells.append(" / ".join(f"{1e6 * s[0]:.1f}" if s else "-" for s in states))
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return lines


def write(report: dict[str, Any], out: Path) -> Path:
    """The report as JSON, named after the GPU and the day."""
    gpu = re.sub(r"[^a-z0-9]+", "-", report["machine"].get("gpu", "none").split(",")[0].lower())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{gpu.strip('-')}-{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def main() -> int:
    """Measure and write; 2 where there is no GPU, 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="stop after about so many")
    arguments = parser.parse_args()
    problem = _no_gpu()
    if problem is not None:
        print(f"gpu-report: {problem}; nothing is measured", file=sys.stderr)
        return 2
    import torch

    from .timing.measure import Stopwatch, read_bandwidth

    start = time.monotonic()
    stopwatch = Stopwatch(torch.device("cuda"))
    report: dict[str, Any] = {"machine": machine(), "roofs": read_bandwidth(stopwatch)}
    report["parity"] = parity(arguments.seconds / 3)
    report["sanitizer"] = sanitizer(arguments.seconds / 3)
    report["rows"], report["not run"] = [], []
    path = write(report, arguments.out)
    for case in cases():
        if time.monotonic() - start > arguments.seconds:
            report["not run"].append(str(case))
            continue
        report["rows"].append(measure(case, stopwatch, report["roofs"]))
        write(report, arguments.out)  # keeps the rows so far, whatever fails later
    report["peak memory over inputs, outputs and gradients"] = peaks(stopwatch.device)
    report["seconds"] = time.monotonic() - start
    write(report, arguments.out)
    for part in ("machine", "roofs", "parity", "sanitizer"):
        print(part, json.dumps(report[part], indent=1))
    print("\n".join(table(report["rows"])))
    print(f"wrote {path}")
    checks = [part for part in report["sanitizer"].values() if isinstance(part, dict)]
    return 0 if all(part.get("exit") == 0 for part in (report["parity"], *checks)) else 1


if __name__ == "__main__":
    sys.exit(main())
