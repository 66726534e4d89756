"""Trainings in a folder: checkpoints that survive a kill, going on, which epoch is the best."""

import dataclasses
import errno
import json
import os
import re
import signal

import pytest
import torch
from fresh import ROOT, forked, python
from threads import one_thread  # noqa: F401

from bahdanau_fast import cli
from bahdanau_fast.seq2seq import Settings, Translator
from bahdanau_fast.seq2seq.data.corpus import TextSettings
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.checkpoints import BEST, LAST
from bahdanau_fast.seq2seq.search.scoring import CorpusScores
from bahdanau_fast.seq2seq.search.translator import Scores
from bahdanau_fast.seq2seq.training import runs
from bahdanau_fast.seq2seq.training.runs import Run
from bahdanau_fast.seq2seq.training.trainer import World

SMALL = Settings(embed_size=8, num_hiddens=12, dropout=0.2, epochs=5, batch_size=16, lr=1e-2)
FEW = dataclasses.replace(SMALL, epochs=4, batch_size=64)  # four epochs of four steps
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TINY = ["--embed-size", "8", "--num-hiddens", "12", "--min-freq", "1", "--epochs", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Numbers in words and in digits."""
    path = tmp_path_factory.mktemp("data") / "numbers.tsv"
    lines = [f"{' '.join(NUMBERS[int(d)] for d in str(n))}.\t{n} !" for n in range(100, 420)]
    path.write_text("\n".join(lines) + "\n")
    return path


def text_of(data, **changes):
    return TextSettings(str(data), min_freq=1, num_steps=8, validation=0.1, test=0.1, **changes)


@pytest.fixture
def few(data, tmp_path):
    """Makes a short training in ``tmp_path``."""
    return lambda **changes: Run(tmp_path, dataclasses.replace(FEW, **changes), text_of(data))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A training that nothing stopped."""
    run = Run(tmp_path_factory.mktemp("whole"), SMALL, text_of(data))
    run.train(progress=False)
    return run


def resumed(out, **options):
    return Run(out, *Run.settings_of(out), resume=True, **options)


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
    assert (translator.settings, translator.text) == (SMALL, whole.text)
    assert translator.kinds == ("words", "words")
    # What was validated is what is loaded.
    pairs = whole.corpus.parts.validation
    scores = translator.score(pairs, translator.translate([source for source, _ in pairs]))
    assert scores.corpus.bleu == pytest.approx(top["bleu"])
    assert scores.corpus.chrf == pytest.approx(top["chrf"])


@pytest.mark.parametrize("stop_at", [1, 7, 16, 33])
def test_a_resumed_training_has_the_losses_of_one_that_nothing_stopped(
    whole, data, tmp_path, stop_at
):
    run = Run(tmp_path, SMALL, text_of(data), save_every=1)
    step = run.trainer.step

    def stopping(batch):
        if len(run.history.losses) == stop_at:
            raise KeyboardInterrupt
        return step(batch)

    run.trainer.step = stopping
    with pytest.raises(KeyboardInterrupt):
        run.train(progress=False)
    torch.manual_seed(stop_at)  # of no importance
    again = resumed(tmp_path)
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
import os, signal, sys
from pathlib import Path
sys.path[:0] = ["tests/seq2seq", "tests/support"]
from test_seq2seq_runs import SMALL, Run, resumed, text_of

data, out, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
synced = 0

def fsync(_):
    global synced
    synced += 1
    if synced == last:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = fsync
run = resumed(out, save_every=1) if last > 3 else Run(out, SMALL, text_of(data), save_every=1)
run.train(progress=False)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills itself as POSIX does")
def test_kills_in_the_middle_of_a_write_leave_a_checkpoint_that_goes_on(whole, data, tmp_path):
    # A checkpoint is synced before it is renamed, and its folder after that.
    for last, steps in ((3, 0), (9, 3), (20, 13)):
        killed = forked("-c", KILLED, data, tmp_path, str(last), cwd=ROOT, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert (tmp_path / f"{LAST}.tmp").exists() == (last % 2 == 1)
        assert len(checkpoints.load(tmp_path / LAST)["losses"]) == steps
    assert resumed(tmp_path).train(progress=False).losses == whole.history.losses


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / LAST
    checkpoints.save({"a": torch.ones(3)}, path)
    real = torch.save

    def half(payload, file):
        real(payload, file)
        file.truncate(100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(ValueError, match=r"must be written, got /.*last\.pt \(No space left on"):
        checkpoints.save({"a": torch.zeros(3)}, path)
    assert list(tmp_path.iterdir()) == [path]
    assert checkpoints.load(path)["a"].tolist() == [1, 1, 1]


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_what_is_no_checkpoint_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / LAST
    with pytest.raises(ValueError, match=r"checkpoint must exist, got .*last\.pt"):
        checkpoints.load(path)
    whole, said = b"", []
    for content in (b"", b"file", "cut", {"format": 0}, [1], {"format": 1, "x": Trap()}):
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
        said.append(str(caught.value).partition(f"{path} ")[2])
    assert said[:3] == ["(another kind of file)", "(another kind of file)", "(cut off)"]
    assert said[3:5] == ["(0)", "(list)"]
    assert re.fullmatch(r"\(not of tensors, .*; nothing in it was run\)", said[5])
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(ValueError, match=r"DIR must hold best.pt or last.pt.*gone \(not there\)"):
        checkpoints.find(tmp_path / "gone")


@pytest.mark.thorough
def test_two_processes_are_one_with_the_doubled_batch(data, tmp_path, capsys):
    options = ["--data", str(data), "--validation", "0.1", "--dropout", "0", "--lr", "0.01"]
    options = ["train", *TINY, *options, "--embed-dropout", "0", "--json"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = ["-m", *launcher, "bahdanau_fast", *options, "--batch-size", "6", "--out"]
    result = python(*command, tmp_path / "two", path=ROOT, OMP_NUM_THREADS="1")
    assert cli.main([*options, "--batch-size", "12", "--out", str(tmp_path / "one")]) == 0
    printed = (result.stdout, capsys.readouterr().out)
    # torch 2.10 prints around it that Gloo is connected.
    found = (json.loads(out[out.index("{") : out.rindex("}") + 1]) for out in printed)
    two, one = (each["validations"][0] for each in found)
    losses, wanted = (checkpoints.load(tmp_path / n / LAST)["losses"] for n in ("two", "one"))
    assert len(wanted) == len(losses) > 20
    difference = float((losses - wanted)[:20].abs().max())
    print(f"largest difference of the loss over 20 steps: {difference:.1e}")
    assert difference <= 1e-5
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


@pytest.fixture
def measured(monkeypatch):
    """Sets what the validations of the next training measure, an epoch after the other."""

    def set_values(**values):
        for name in ("bleu", "chrf"):
            values[name] = iter(values.get(name, [0.0] * 9))

        def score(*_):
            return Scores(CorpusScores(next(values["bleu"]), next(values["chrf"]), ""), 0, 0, 0)

        monkeypatch.setattr(Translator, "score", score)
        if "loss" in values:
            losses = iter(values["loss"])
            monkeypatch.setattr(runs, "validation_loss", lambda *_: next(losses))

    return set_values


def kept(out):
    """The epoch in best.pt; its weights are those of that epoch's end."""
    payload = checkpoints.load(out / BEST)
    epoch = payload["validations"][-1]["epoch"]
    assert payload["schedule"]["last_epoch"] == len(payload["losses"]) == 4 * epoch
    return epoch


@pytest.mark.parametrize(("metric", "epoch"), [("loss", 2), ("bleu", 4), ("chrf", 1)])
def test_the_metric_chooses(few, tmp_path, measured, metric, epoch):
    measured(loss=[3.0, 1.0, 2.0, 1.0], bleu=[0.0, 1.0, 5.0, 5.0], chrf=[9.0, 1.0, 8.0, 2.0])
    # Epochs 2 and 4 have the same loss: the earlier is kept. Epochs 3 and 4 have the same BLEU:
    # the one with the lower loss is.
    run = few(best_metric=metric)
    run.train(progress=False)
    assert kept(tmp_path) == run.best["epoch"] == epoch
    assert run.best == run.history.validations[epoch - 1]


def test_validation_loss_is_the_mean_over_all_target_tokens(few, monkeypatch):
    monkeypatch.setattr(runs, "_TRANSLATED", 3)  # of the loss there is no sample
    run = few(epochs=1, label_smoothing=0.3)
    (measured,) = run.train(progress=False).validations
    assert run.trainer.model.training
    model, pairs = run.trainer.model.eval(), run.validated
    assert len(pairs) == len(run.corpus.parts.validation) > 20
    total, tokens = 0.0, 0
    for source, lens, target, count in zip(*pairs.tensors, strict=True):
        state = model.decoder.init_state(model.encoder(source[None], lens[None]), lens[None])
        given = torch.tensor([[1, *target[: count - 1].tolist()]])  # <bos>, then what is wanted
        logits = model.decoder(given, state)[0][0].double()
        total += -logits.log_softmax(-1)[range(count), target[:count]].sum().item()
        tokens += int(count)
    # fp32 logits and sums of a few hundred terms: some 1e-7 relative each.
    assert measured["loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_validation_loss_that_is_not_finite_is_an_error(few, tmp_path, measured, loss):
    measured(loss=[3.0, loss])
    said = rf"the validation loss must be finite, got {loss} after epoch 2"
    with pytest.raises(ValueError, match=said):
        few().train(progress=False)
    assert kept(tmp_path) == 1
    assert [v["loss"] for v in checkpoints.load(tmp_path / LAST)["validations"]] == [3.0]


def test_a_stop_between_the_two_files_of_the_first_epoch(few, tmp_path, monkeypatch):
    """best.pt is there, last.pt is that of step 0: going on writes best.pt again."""
    run = few(epochs=1)
    save = run._save

    def stopping(name):
        if name == LAST and run.history.losses:
            raise KeyboardInterrupt
        save(name)

    monkeypatch.setattr(run, "_save", stopping)
    with pytest.raises(KeyboardInterrupt):
        run.train(progress=False)
    assert kept(tmp_path) == 1
    again = resumed(tmp_path)
    assert again.history.losses == []
    again.train(progress=False)
    assert kept(tmp_path) == again.best["epoch"] == 1
