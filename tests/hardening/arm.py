"""The contract table on ARM, imitated by qemu: ``make arm``, which runs arm.sh first.

Compiled here by a cross compiler, tested by Python for ARM. Prints the largest share of the allowed
error (bahdanau_fast.parity) in each dtype. Arguments are pytest's. No time here is a processor's.
"""

import os
import platform
import shlex
import subprocess
import sys

import build

ARM = build.ROOT / "build" / "arm"
CONTRACT = [str(build.ROOT / "tests/contract/test_parity.py"), "-k", "test_contract and not module"]


class Worst:
    """A pytest plugin: the largest share of the allowed error."""

    def pytest_collection_finish(self):
        import parity

        self.shares, keep = {}, parity.keep_the_rule

        def kept(found, what):
            dtype = what.partition(",")[0]
            for name, share in found.items():
                self.shares[dtype] = max(self.shares.get(dtype, (0.0, "")), (share, name))
            keep(found, what)

        parity.keep_the_rule = kept

    def pytest_terminal_summary(self, terminalreporter):
        for dtype, (share, name) in self.shares.items():
            terminalreporter.write_line(f"{dtype}: {share:.3f} of the allowed error, {name}")


def main():
    """Compile here, test in Python for ARM."""
    if platform.machine() == "aarch64":
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-p", "imported", "-o", "pythonpath="]
        options += ["-c", str(build.ROOT / "pyproject.toml")]
        return pytest.main([*options, *(sys.argv[1:] or CONTRACT)], [Worst()])
    os.environ["CXX"] = "aarch64-linux-gnu-g++"
    os.environ["LDFLAGS"] = shlex.quote(f"-L{ARM / 'packages/torch/lib'}")
    folder = build.lay_out("arm", f"-idirafter {shlex.quote(str(ARM / 'root/usr/include'))}")
    variables = build.environment(folder, BAHDANAU_FAST_BUILD=str(folder), OMP_NUM_THREADS="1")
    variables["PYTHONPATH"] += f":{ARM / 'packages'}"
    command = [ARM / "python", __file__, *sys.argv[1:]]
    return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
