"""The suite on C++ compiled with sanitizers: ``python tests/hardening/sanitize.py``.

AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer, side by side, each in a build
of its own (build/hardening/address, .../thread). Only the extension is compiled with them; Python
and torch are not, hence the preloaded runtime and the files of suppressions beside this one.
"""

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent
TESTS = build.ROOT / "tests"
CHANCE = 1000  # cases of chance for each entry point in test_fuzz.py
# The drawn cases, the contract, wrong arguments, odd memory; not what measures time, memory or
# precision, nor what traces instead of computing.
ADDRESS = {
    "test_fuzz.py": "",
    "test_decoding.py": "not opcheck",
    "test_greedy.py": "not opcheck and not hook",
    "test_recurrent.py": "not hook",
    "test_deferred.py": "",
    "test_step.py": "",
    "test_projection.py": "few_rows or wanted or values_and_gradients",
    "test_operator_errors.py": "",
    "test_parity.py": "not very_long",
    "test_general.py": "forms or test_contract or layouts or scores or gradcheck",
    "test_location.py": "steps or gradients",
    "test_masks.py": "not cost",
    "test_robustness.py": "finite or gradients or strides or eight",
    "test_instruction_sets.py": "",
    "test_dropout.py": "",
    "test_operators.py": "bitwise or gradcheck or asked_for",
    "test_pooling.py": "parity or needed or fit_together",
}
# What has enough to do for more than one thread.
THREAD = {
    "test_operators.py": "bitwise",
    "test_robustness.py": "eight or finite",
    "test_parity.py": "test_contract or drawn_cases",
    "test_general.py": "forms",
    "test_location.py": "test_steps or gradients_of",
    "test_dropout.py": "",
    "test_step.py": "",
    "test_projection.py": "threads or few_rows",
    "test_recurrent.py": "threads or sizes or steps or dropout",
    "test_decoding.py": "not opcheck",
    "test_greedy.py": "steps and not hook",
    "test_deferred.py": "",
    "test_pooling.py": "larger",
}
SANITIZERS = {
    "address": (
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O1",
        "libasan.so",
        {
            # Python and torch keep what they allocate; leaks of ours: test_robustness.py.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": f"print_stacktrace=1:suppressions={HERE / 'undefined.supp'}",
        },
        ADDRESS,
    ),
    "thread": (
        "-fsanitize=thread -g1 -O1",
        "libtsan.so",
        {
            "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:ignore_noninstrumented_modules=1:"
            f"history_size=4:suppressions={HERE / 'thread.supp'}",
        },
        THREAD,
    ),
}


def run(name, quick):
    """Build with a sanitizer and run its tests; a row of figures."""
    start = time.time()
    flags, runtime, options, selected = SANITIZERS[name]
    folder = build.lay_out(name, flags)
    # libstdc++ too: the runtimes look for its throw when they start, before Python loads it.
    libraries = ":".join(map(where_is, (runtime, "libstdc++.so.6")))
    environment = build.environment(folder, LD_PRELOAD=libraries, **options)
    # Threads that wait awake would take the cores from the other sanitizer.
    environment |= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    environment["BAHDANAU_FAST_CHANCE"] = str(CHANCE)
    environment["BAHDANAU_FAST_BUILD"] = str(folder)
    environment["PYTHONPATH"] += f":{HERE}"  # plugins are imported before pytest's own paths
    if quick:
        selected = dict(list(selected.items())[:1])
    files = [run_file(name, file, chosen, folder, environment) for file, chosen in selected.items()]
    row = {"sanitizer": name, "flags": flags}
    row |= {what: sum(f[what] for f in files) for what in ("tests", "failures")}
    row |= {"minutes": round((time.time() - start) / 60, 1), "files": files}
    told = ", ".join(f"{row[what]} {what}" for what in ("tests", "failures", "minutes"))
    print(f"{name}: {told}", flush=True)
    return row


def run_file(name, file, chosen, folder, environment):
    """The tests of one file whose names fit; a row of figures."""
    start = time.time()
    command = ["-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider"]
    # The checkout, which pyproject.toml puts in front, has the usual build in it.
    command += ["-o", f"pythonpath={folder} {HERE} {TESTS / 'support'}", "-p", "imported"]
    command += ["-c", str(build.ROOT / "pyproject.toml"), str(next(TESTS.rglob(file)))]
    done = python([*command, "-k", chosen] if chosen else command, folder, environment)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = sum(map(int, re.findall(r"(\d+) (?:failed|error)", done.stdout)))
    row = {"file": file, "chosen": chosen, "tests": int(passed[1]) if passed else 0}
    # What ends the process ends it before pytest can count.
    row |= {"failures": failed or int(done.returncode != 0)}
    told = f"{row['tests']} tests, {row['failures']} failures"
    print(f"{name} {file}: {told}, {time.time() - start:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], flush=True)
    return row


def where_is(library):
    done = subprocess.run(
        ["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def python(arguments, folder, environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def main():
    """Run the sanitizers; 1 when one of them found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first file of each only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(len(SANITIZERS)) as both:
        rows = list(both.map(lambda name: run(name, arguments.quick), SANITIZERS))
    if arguments.json is not None:
        build.write(arguments.json, {"sanitizers": rows})
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
