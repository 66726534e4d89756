"""Trainings in a folder: checkpoints that survive a kill, going on, several processes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from threads import one_thread  # noqa: F401

import bahdanau_fast
from bahdanau_fast.seq2seq import Settings, Translator
from bahdanau_fast.seq2seq.data.corpus import TextSettings
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.checkpoints import BEST, LAST
from bahdanau_fast.seq2seq.training.distributed import World
from bahdanau_fast.seq2seq.training.runs import Run

ROOT = str(Path(bahdanau_fast.__file__).parents[1])
SMALL = Settings(embed_size=8, num_hiddens=12, dropout=0.2, epochs=5, batch_size=16, lr=1e-2)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Numbers in words and in digits."""
    path = tmp_path_factory.mktemp("data") / "numbers.tsv"
    lines = [f"{' '.join(NUMBERS[int(d)] for d in str(n))}.\t{n} !" for n in range(100, 420)]
    path.write_text("\n".join(lines) + "\n")
    return path


def text_of(data, **changes):
    return TextSettings(str(data), min_freq=1, num_steps=8, validation=0.1, test=0.1, **changes)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A training that nothing stopped."""
    run = Run(tmp_path_factory.mktemp("whole"), SMALL, text_of(data))
    run.train(progress=False)
    return run


def test_a_run_leaves_checkpoints_losses_and_scores(whole):
    history = whole.history
    assert len(history.losses) == 5 * 16
    assert sum(history.losses[-8:]) < 0.7 * sum(history.losses[:8])
    assert [v["epoch"] for v in history.validations] == [1, 2, 3, 4, 5]
    assert history.validations[-1]["loss"] < history.validations[0]["loss"]
    payload = checkpoints.load(whole.out / LAST)
    assert payload["losses"].tolist() == history.losses
    best = checkpoints.load(whole.out / BEST)
    top = min(history.validations, key=lambda v: v["loss"])
    assert best["validations"][-1] == whole.best == top
    assert not list(whole.out.glob("*.tmp"))
    assert checkpoints.find(whole.out) == whole.out / BEST
    translator = Translator.load(whole.out)
    assert (translator.settings, translator.text, translator.kinds) == (
        SMALL,
        whole.text,
        ("words", "words"),
    )
    # What was validated is what is loaded.
    pairs = whole.corpus.parts.validation
    scores = translator.score(pairs, translator.translate([source for source, _ in pairs]))
    assert scores.corpus.bleu == pytest.approx(top["bleu"])
    assert scores.corpus.chrf == pytest.approx(top["chrf"])


@pytest.mark.parametrize("stop_at", [1, 7, 16, 33])
def test_a_resumed_training_has_the_losses_of_one_that_nothing_stopped(
    whole, data, tmp_path, stop_at
):
    class StopError(Exception):
        pass

    run = Run(tmp_path, SMALL, text_of(data), save_every=1)
    step = run.trainer.step

    def stopping(batch):
        if len(run.history.losses) == stop_at:
            raise StopError
        return step(batch)

    run.trainer.step = stopping
    with pytest.raises(StopError):
        run.train(progress=False)
    torch.manual_seed(stop_at)  # of no importance
    settings, text = Run.settings_of(tmp_path)
    again = Run(tmp_path, settings, text, resume=True)
    assert again.history.losses == whole.history.losses[:stop_at]
    again.train(progress=False)
    assert again.history.losses == whole.history.losses
    assert again.history.validations == whole.history.validations
    ours, theirs = (checkpoints.load(out / LAST)["model"] for out in (tmp_path, whole.out))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_more_epochs_and_changed_data(whole, data, tmp_path):
    changed = tmp_path / "changed.tsv"
    changed.write_text(data.read_text().replace("100 !", "one hundred"))
    with pytest.raises(ValueError, match=r"data must be the data of the training.*changed since"):
        Run(whole.out, SMALL, text_of(changed), resume=True)
    with pytest.raises(ValueError, match=r"processes must equal those of .*, 1, got 2"):
        Run(whole.out, SMALL, text_of(data), resume=True, world=World(0, 2))
    longer = dataclasses.replace(SMALL, epochs=6)
    run = Run(whole.out, longer, text_of(data), resume=True)
    assert run.trainer.total_steps == 96
    assert len(run.history.losses) == 80
    with pytest.raises(ValueError, match=r"checkpoint must exist, got .*last\.pt"):
        Run(tmp_path / "empty", SMALL, text_of(data), resume=True)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import sacrebleu, torch, torch._dynamo  # once, before the forks, also what is imported late
torch.set_num_threads(1)
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.training.runs import Run
sys.path[:0] = ['tests/seq2seq', 'tests/support']
from test_seq2seq_runs import SMALL, text_of

data, out, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
write, unfinished, steps = os.fsync, 0, []
for kill in range(kills):
    (out / "last.pt.tmp").unlink(missing_ok=True)
    before = (out / "last.pt").stat().st_mtime_ns if kill else 0
    child = os.fork()
    if child == 0:
        os.fsync = lambda descriptor: (time.sleep(0.01), write(descriptor))  # a slow disk
        if kill:
            settings, text = Run.settings_of(out)
        else:
            settings, text = SMALL, text_of(data)
        Run(out, settings, text, resume=kill > 0, save_every=1).train(progress=False)
        os._exit(0)
    # From its first write on; before the very first there is nothing to lose.
    # Now and then a step later, or on a busy machine none would ever be finished.
    for _ in range(2 if kill % 5 == 4 else 1):
        while not (out / "last.pt").exists() or (out / "last.pt").stat().st_mtime_ns == before:
            time.sleep(0.001)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the training ended by itself"
        before = (out / "last.pt").stat().st_mtime_ns
    time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    unfinished += (out / "last.pt.tmp").exists()
    steps.append(len(checkpoints.load(out / "last.pt")["losses"]))
print(unfinished, *steps)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_twenty_kills_leave_a_checkpoint_that_goes_on_to_the_same_losses(whole, data, tmp_path):
    command = [sys.executable, "-c", KILLED, str(data), str(tmp_path), "20", "0"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    unfinished, *steps = map(int, result.stdout.split())
    print(f"steps after each kill {steps}, {unfinished} of 20 in the middle of a write")
    assert len(steps) == 20
    assert steps == sorted(steps)
    assert 0 < steps[-1] < len(whole.history.losses)
    assert unfinished > 0  # some hit a write
    settings, text = Run.settings_of(tmp_path)
    run = Run(tmp_path, settings, text, resume=True)
    run.train(progress=False)
    assert run.history.losses == whole.history.losses


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / LAST
    checkpoints.save({"a": torch.ones(3)}, path)
    real = torch.save

    def half(payload, file):
        real(payload, file)
        file.truncate(100)
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save({"a": torch.zeros(3)}, path)
    assert checkpoints.load(path)["a"].tolist() == [1, 1, 1]


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_what_is_no_checkpoint_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / LAST
    with pytest.raises(ValueError, match=r"checkpoint must exist, got .*last\.pt"):
        checkpoints.load(path)
    whole = b""
    for content in (b"", b"no checkpoint", "cut", {"format": 0}, [1], {"format": 1, "x": Trap()}):
        if content == "cut":
            path.write_bytes(whole[: len(whole) // 2])
        elif isinstance(content, bytes):
            path.write_bytes(content)
            checkpoints.save({"a": torch.ones(999)}, tmp_path / "whole")
            whole = (tmp_path / "whole").read_bytes()
        else:
            torch.save(content, path)
        with pytest.raises(ValueError, match="checkpoint must be") as caught:
            checkpoints.load(path)
        assert "\n" not in str(caught.value)
        assert "weights_only" not in str(caught.value)
    assert "; nothing in it was run)" in str(caught.value)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(ValueError, match=r"DIR must hold best.pt or last.pt.*gone \(not there\)"):
        checkpoints.find(tmp_path / "gone")


def launch(out, data, *options, processes=1):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = [*launcher, "-m"] if processes > 1 else []
    sizes = "--embed-size 8 --num-hiddens 12 --min-freq 1 --epochs 1 --dropout 0 --lr 0.01"
    sizes += " --embed-dropout 0"
    command = [sys.executable, "-m", *launcher, "bahdanau_fast", "train", "--out", str(out)]
    command += ["--data", str(data), "--validation", "0.1", *sizes.split(), *options, "--json"]
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout), checkpoints.load(out / LAST)["losses"]


def test_two_processes_are_one_with_the_doubled_batch(data, tmp_path):
    two, losses = launch(tmp_path / "two", data, "--batch-size", "6", processes=2)
    one, wanted = launch(tmp_path / "one", data, "--batch-size", "12")
    assert len(wanted) == len(losses) > 20
    difference = float((losses - wanted)[:20].abs().max())
    print(f"largest difference of the loss over 20 steps: {difference:.1e}")
    assert difference <= 1e-5
    assert two["validations"][0]["loss"] == pytest.approx(one["validations"][0]["loss"], rel=1e-4)
