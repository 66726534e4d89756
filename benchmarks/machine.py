"""The machine that figures come from, or why it cannot: ``python -m benchmarks.machine`` says it.

torch is imported only when asked for: it may be missing, and a driver may hang.
"""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def machine() -> dict[str, str]:
    """Processor, versions and commit of this run."""
    import torch

    import bahdanau_fast as bf

    explained = bf.backends.explain("cpu").splitlines()
    return {
        "cpu": _cpu_model(),
        "cores": f"{os.cpu_count()} ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bahdanau_fast": bf.__version__,
        "commit": _commit(),
        "backend": explained[0],
        "cpu kernels": next(
            line.split(maxsplit=1)[-1] for line in explained if line.split()[0] == "cpu"
        ),
    }


def _cpu_model() -> str:
    """The processor's name with family and model, which cloud machines often leave out of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    return f"{fields['model name']} ({numbers})"


def slug(where: dict[str, str]) -> str:
    """File name of a machine's figures: processor, family, model and cores."""
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor|family|model)\b|@.*?(?=\()", " ", where["cpu"])
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"cpu-{words}-{where['cores'].split()[0]}cores"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        with suppress(OSError):
            return subprocess.run(
                command, capture_output=True, text=True, check=False
            ).stdout.strip()
        return ""

    changes = " with changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "none") + changes


def rows_text(figures: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each row of a list of rows: git shows changed rows."""
    lines = []
    for name, value in figures.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = (json.dumps(row, ensure_ascii=False) for row in value)
            text = "[\n" + ",\n".join(rows) + "\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# ---- a GPU


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"no torch: {sys.executable} cannot import it ({error})"
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return f"a CPU torch: {torch.__version__} is built for neither CUDA nor ROCm"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__}, built for {built}, sees none"
    return None


def with_gpu(device: str) -> dict[str, Any]:
    """What figures of a device come from, or a ``problem`` where there is no GPU."""
    problem = missing() if device == "cuda" else None
    if problem:
        return {"problem": problem}
    import torch

    from bahdanau_fast import backends

    where = machine() | {"backends": backends.explain(device), "gpu": device}
    where["cuda"] = torch.version.cuda or torch.version.hip or "none"
    with suppress(ImportError):  # of several distributions: triton, pytorch-triton-rocm
        where["triton"] = importlib.import_module("triton").__version__
    if os.environ.get("BAHDANAU_FAST_COMMIT"):
        where["commit"] = os.environ["BAHDANAU_FAST_COMMIT"]
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        where["gpu"] = f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
    return where


if __name__ == "__main__":
    problem = missing()
    if problem:
        who = (*sys.argv[1:], "gpu-report")[0]
        print(f"{who}: {problem}; nothing is measured", file=sys.stderr)
    sys.exit(2 if problem else 0)
