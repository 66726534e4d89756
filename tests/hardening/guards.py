"""Doubles and halves every number that decides in the kernels, one at a time: ``make mutants``.

The numbers are found by a scan (planted/guards.py). In a copy of the tree each becomes a call that
reads which one is wrong, and how wrong, from a file: the C++ is built once for all of them. A guard
is killed if the tests of both sides of its magnitude fail. Where they pass, EXPLAINED says why.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time

from mutants import asked, copy_tree, of_pytest, verdict
from planted.guards import EXPLAINED, FACTORS, scan, tests_of

import build
from benchmarks.timing.machine import machine

READER = """#pragma once
#include <cstdio>
namespace bahdanau_fast {
struct WrongGuard {
  int place = -1;
  double factor = 1;
  WrongGuard() {
    if (FILE* file = fopen("PATH", "r")) {
      if (fscanf(file, "%d %lf", &place, &factor) != 2) place = -1;
      fclose(file);
    }
  }
};
static inline const WrongGuard& wrong_guard() {
  static const WrongGuard wrong;
  return wrong;
}
template <class X>  // constexpr for those who call it: what it makes is no constant
static constexpr X guard(int place, X value) {
  return place == wrong_guard().place ? X(value * wrong_guard().factor) : value;
}
}  // namespace bahdanau_fast
"""


def make_changeable(tree, chosen):
    """Every guard of a tree into a call; a file that is not there yet names the wrong one."""
    reader = tree / "csrc" / "common" / "guard.h"
    reader.write_text(READER.replace("PATH", str(chosen)))
    shutil.copystat(__file__, reader)
    guards = scan(tree)
    files = {}
    for place, guard in enumerate(guards):
        files.setdefault(guard.file, []).append((place, guard))
    for file, here in files.items():
        path = tree / file
        text = path.read_text()
        edits = [(g.at, g.text, f"guard({place}, {g.floating})") for place, g in here]
        for start in {guard.constant for _, guard in here} - {-1}:
            inline = "inline " if text[:start].endswith("static ") else ""
            edits.append((start, "constexpr", f"{inline}const"))
        for at, old, new in sorted(edits, reverse=True):
            text = text[:at] + new + text[at + len(old) :]
        times = path.stat()
        path.write_text(text.replace("#pragma once\n", '#pragma once\n#include "common/guard.h"\n'))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # built again only if it changed
    return guards


class Guarded:
    """A copy of the tree, and the package built of it, in which any guard can be made wrong."""

    def __init__(self):
        self.tree, self.package = build.BUILD / "guards-tree", build.BUILD / "guards"
        self.chosen = build.BUILD / "guard"
        self.chosen.unlink(missing_ok=True)
        self.commit = machine()["commit"]
        copy_tree(self.tree)
        self.guards = make_changeable(self.tree, self.chosen)
        build.lay_out(self.package.name, "-O1", source=self.tree)
        _, environment = of_pytest(("forked.py", ""), self.tree, self.package, "-O1")
        self.forks = subprocess.Popen(
            [sys.executable, self.tree / "tests" / "hardening" / "forked.py"],
            cwd=self.package,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def check(self, files):
        """Whether all these tests pass; the one that failed, or what they said last."""
        passes, said, by = True, "", ""
        for tests in files:
            if passes:
                arguments, _ = of_pytest(tests, self.tree, self.package)
                print(json.dumps(arguments), file=self.forks.stdin, flush=True)
                passes, said, by = verdict(*json.loads(self.forks.stdout.readline()))
        return passes, by or said

    def attempt(self, place, way):
        """The row of a guard that is wrong in a way."""
        start, guard = time.time(), self.guards[place]
        self.chosen.write_text(f"{place} {FACTORS[way]}\n")
        passes, by = self.check(tests_of(guard))
        self.chosen.unlink()
        row = {
            "guard": guard.name,
            "became": way,
            "verdict": "survived" if passes else "killed",
            "by": by,
            "seconds": round(time.time() - start),
            "commit": self.commit,
        }
        print(f"{row['verdict']:<9} {guard.name} {way} ({row['seconds']} s): {by}", flush=True)
        return row


def main():
    """Try the guards asked for; 1 when one survives that nothing explains."""
    arguments = asked(__doc__)
    rows = {}
    if arguments.again:
        before = json.loads(arguments.json.read_text())["guards"]
        rows = {(row["guard"], row["became"]): row for row in before}
    tree = Guarded()
    wanted = [
        (place, guard, way)
        for place, guard in enumerate(tree.guards)
        for way in FACTORS
        if re.search(arguments.only, f"{guard.name} {way}")
        and rows.get((guard.name, way), {"verdict": "new"})["verdict"] != "killed"
    ]
    for files in dict.fromkeys(tests_of(guard) for _, guard, _ in wanted):
        passes, by = tree.check(files)
        if not passes:
            raise RuntimeError(f"{by} fails with every guard as it is")
        print(f"no guard wrong {files}: {by}", flush=True)
    order = [(guard.name, way) for guard in tree.guards for way in FACTORS]
    for place, guard, way in wanted:
        rows[guard.name, way] = tree.attempt(place, way)
        if arguments.json is not None:
            stored = [rows[key] for key in order if key in rows]
            text = json.dumps({"machine": machine(), "guards": stored}, indent=1)
            arguments.json.write_text(text + "\n")
    survived = {key for key, row in rows.items() if row["verdict"] != "killed"}
    print(f"{len(survived)} of {len(rows)} survived, without a reason {survived - set(EXPLAINED)}")
    return int(not survived <= set(EXPLAINED))


if __name__ == "__main__":
    sys.exit(main())
