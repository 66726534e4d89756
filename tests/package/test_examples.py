"""Each example runs as it stands, and its figures are what it is there to show."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
FALLS = r"loss ([\d.]+).* loss ([\d.]+).*"  # the first and the last
SHOWS = {
    "captioning.py": (
        rf"{FALLS}\b(\d+)% of new captions.* (\d+)% of the cases",
        lambda first, last, right, looked: last < first / 3 and right > 70 and looked > 60,
    ),
    "d2l_chapter.py": (
        rf"{FALLS}\b(\d+)% of 40 sentences.*\nthe(?: \w+){{4}} <eos> -> les(?: \w+){{4}} <eos>",
        lambda first, last, right: last < first / 10 and right > 80,
    ),
    "fuse_a_model.py": (
        r"softmax\(V \. tanh\(W1 q \+ W1\.bias \+ W2 k.* at most (\S+)\n"
        r"losses: (\S+) and (\S+)\n.* (\S+)x\n",
        # How much faster it is depends on what else the machine does.
        lambda apart, theirs, ours, ratio: apart < 1e-5 > abs(theirs - ours) and ratio > 0.8,
    ),
    "own_decoder.py": (
        rf"{FALLS}\n1 beams: ([\d.]+)%.* P (\S+)\n5 beams: ([\d.]+)%.* P (\S+)\n",
        lambda first, last, one, p, five, higher: (
            last < first / 3 and five >= one > 50 and higher > p
        ),
    ),
    "pointer_network.py": (
        r"random ([\d.]+), sampled ([\d.]+), greedy ([\d.]+), nearest neighbour ([\d.]+)",
        lambda random, sampled, greedy, nearest: (
            greedy < sampled < 0.8 * random and abs(greedy / nearest - 1) < 0.1
        ),
    ),
    "tacotron.py": (
        rf"{FALLS}\b(\d+)% of the frames",
        # Of six places, 17 % are met by chance.
        lambda first, last, looked: last < first / 2 and looked > 50,
    ),
    "distributed.py": (
        rf"{FALLS}\ngradients were equal on 2 processes",
        lambda first, last: last < first / 3,
    ),
}


def test_every_example_is_tried():
    assert {path.name for path in FOLDER.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_shows(name, threads, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    path, (pattern, holds) = str(FOLDER / name), SHOWS[name]
    if name == "distributed.py":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*torchrun, "--nproc-per-node=2", path], check=True, timeout=180)
    else:  # in this process, which has torch loaded already
        threads(1)
        runpy.run_path(path, run_name="__main__")
    printed = capfd.readouterr().out
    found = re.search(pattern, printed, re.DOTALL)
    assert found, printed
    assert holds(*map(float, found.groups())), printed
    picture = tmp_path / "d2l_chapter.png"
    assert name != "d2l_chapter.py" or picture.read_bytes().startswith(b"\x89PNG")


def test_the_distributed_example_alone_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"^start it by torchrun --standalone --nproc-per-node 2 "):
        runpy.run_path(str(FOLDER / "distributed.py"), run_name="__main__")


def test_the_lesson_prints_what_it_shows(threads, capsys):
    threads(1)
    names = {}
    for cell in json.loads((FOLDER.parent / "docs/lesson.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = re.sub(r"^%.*", "", "".join(cell["source"]), flags=re.MULTILINE)
            exec(compile(source, "lesson.ipynb", "exec"), names)
            printed = capsys.readouterr().out
            shown = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            # Times are the reader's own; what is learnt varies with the processor.
            assert "model" in source or shown in ("", printed)
    assert names["loss"] < 1
