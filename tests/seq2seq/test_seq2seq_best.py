"""Which epoch ``best.pt`` holds, and what it is chosen by."""

import dataclasses
import json

import pytest
import torch
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

SMALL = Settings(embed_size=8, num_hiddens=12, dropout=0.2, epochs=4, batch_size=32, lr=1e-2)
ONE = dataclasses.replace(SMALL, epochs=1)
WORDS = ["go", "run", "wait", "stop", "come", "look"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = [f"{a} {b} {n}\t{n} {b} {a}" for a in WORDS for b in WORDS for n in range(4)]
    path.write_text("\n".join(lines) + "\n")
    return path


def text_of(data):
    return TextSettings(str(data), min_freq=1, num_steps=8, validation=0.2, test=0.1)


@pytest.fixture
def measured(monkeypatch):
    """Sets what the validations of the next training measure, an epoch after the other."""

    def set_values(**values):
        for name in ("bleu", "chrf"):
            values[name] = iter(values.get(name, [0.0] * 9))
        monkeypatch.setattr(
            Translator,
            "score",
            lambda *_: Scores(
                CorpusScores(next(values["bleu"]), next(values["chrf"]), ""), 0, 0, 0
            ),
        )
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


@pytest.mark.parametrize("metric", ["loss", "bleu", "chrf"])
def test_the_last_epoch_is_best_where_the_loss_falls_and_bleu_stays_zero(
    data, tmp_path, measured, metric
):
    measured(loss=[4.0, 3.0, 2.0, 1.0])
    run = Run(tmp_path, dataclasses.replace(SMALL, best_metric=metric), text_of(data))
    run.train(progress=False)
    assert [v["bleu"] for v in run.history.validations] == [0.0] * 4
    assert kept(tmp_path) == run.best["epoch"] == 4
    best, last = (checkpoints.load(tmp_path / name)["model"] for name in (BEST, LAST))
    assert all(torch.equal(best[name], last[name]) for name in last)


@pytest.mark.parametrize(("metric", "epoch"), [("loss", 2), ("bleu", 4), ("chrf", 1)])
def test_the_metric_chooses(data, tmp_path, measured, metric, epoch):
    measured(loss=[3.0, 1.0, 2.0, 1.0], bleu=[0.0, 1.0, 5.0, 5.0], chrf=[9.0, 1.0, 8.0, 2.0])
    # Epochs 2 and 4 have the same loss: the earlier is kept. Epochs 3 and 4 have the same BLEU:
    # the one with the lower loss is.
    run = Run(tmp_path, dataclasses.replace(SMALL, best_metric=metric), text_of(data))
    run.train(progress=False)
    assert kept(tmp_path) == run.best["epoch"] == epoch
    assert run.best == run.history.validations[epoch - 1]


def test_validation_loss_is_the_mean_over_all_target_tokens(data, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_TRANSLATED", 3)  # of the loss there is no sample
    run = Run(tmp_path, dataclasses.replace(ONE, label_smoothing=0.3), text_of(data))
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
def test_a_validation_loss_that_is_not_finite_is_an_error(data, tmp_path, measured, loss):
    measured(loss=[3.0, loss])
    run = Run(tmp_path, SMALL, text_of(data))
    said = rf"the validation loss must be finite, got {loss} after epoch 2"
    with pytest.raises(ValueError, match=said):
        run.train(progress=False)
    assert kept(tmp_path) == 1
    assert [v["loss"] for v in checkpoints.load(tmp_path / LAST)["validations"]] == [3.0]


def test_a_stop_between_the_two_files_of_the_first_epoch(data, tmp_path, monkeypatch):
    """best.pt is there, last.pt is that of step 0: going on writes best.pt again."""
    run = Run(tmp_path, ONE, text_of(data))
    save = run._save

    def stopping(name):
        if name == LAST and run.history.losses:
            raise KeyboardInterrupt
        save(name)

    monkeypatch.setattr(run, "_save", stopping)
    with pytest.raises(KeyboardInterrupt):
        run.train(progress=False)
    assert kept(tmp_path) == 1
    again = Run(tmp_path, *Run.settings_of(tmp_path), resume=True)
    assert again.history.losses == []
    again.train(progress=False)
    assert kept(tmp_path) == again.best["epoch"] == 1


def as_before(out, epoch):
    """Make best.pt and last.pt what they were when BLEU chose, and best.pt that of ``epoch``."""
    for name in (BEST, LAST):
        payload = checkpoints.load(out / name)
        del payload["settings"]["best_metric"], payload["format"]
        payload["validations"] = payload["validations"][: epoch if name == BEST else None]
        for validation in payload["validations"]:
            del validation["chrf"]
        checkpoints.save(payload, out / name)


def test_a_training_from_before_the_choice_goes_on(data, tmp_path, measured, capsys):
    measured(loss=[4.0, 3.0, 2.0, 2.5])
    Run(tmp_path, dataclasses.replace(SMALL, epochs=3), text_of(data)).train(progress=False)
    as_before(tmp_path, 1)
    again = ["train", "--resume", "--out", str(tmp_path), "--json"]
    # Nothing is left to train, and the epoch in last.pt is better than the one BLEU chose.
    assert cli.main(again) == 0
    out, err = capsys.readouterr()
    assert "best.pt was chosen by BLEU until now; from here on by validation loss\n" in err
    assert json.loads(out)["best"] == {"epoch": 3, "loss": 2.0, "bleu": 0.0}
    measured(loss=[2.5])
    assert cli.main([*again, "--epochs", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["best"]["epoch"], len(figures["validations"])) == (3, 4)
    assert kept(tmp_path) == 3
    # The note is for the first time alone once an epoch has been written.
    assert cli.main(again) == 0
    assert "until now" not in capsys.readouterr().err


def test_the_metric_is_an_option_of_train_and_kept_by_resume(data, tmp_path, capsys):
    tiny = ["--embed-size", "8", "--num-hiddens", "12", "--min-freq", "1", "--epochs", "1"]
    train = ["train", "--data", str(data), "--out", str(tmp_path), "--validation", "0.2"]
    assert cli.main([*train, *tiny, "--best-metric", "chrf"]) == 0
    assert "best.pt is epoch 1, the best by validation chrF (loss " in capsys.readouterr().out
    assert Run.settings_of(tmp_path)[0].best_metric == "chrf"
    assert cli.main(["train", "--resume", "--out", str(tmp_path), "--best-metric", "loss"]) == 2
    assert "--best-metric must be left out with --resume" in capsys.readouterr().err


def test_without_validation_pairs_no_epoch_is_called_the_best(data, tmp_path, capsys):
    tiny = ["--embed-size", "8", "--num-hiddens", "12", "--min-freq", "1", "--epochs", "1"]
    train = ["train", "--data", str(data), "--out", str(tmp_path), "--validation", "0"]
    assert cli.main([*train, *tiny]) == 0
    out = capsys.readouterr().out
    assert "last.pt is the last epoch; no validation pairs, so there is no best one\n" in out
    assert not (tmp_path / BEST).exists()
