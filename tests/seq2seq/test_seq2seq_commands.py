"""The commands train, translate, evaluate and plot, as a user meets them, good and bad input."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from threads import one_thread  # noqa: F401

from bahdanau_fast import cli
from bahdanau_fast.seq2seq import Translation
from bahdanau_fast.seq2seq.cli import actions, cores, plots
from bahdanau_fast.seq2seq.model import checkpoints

TINY = ["--embed-size", "8", "--num-hiddens", "12", "--min-freq", "1", "--num-steps", "10"]
TINY += ["--batch-size", "16", "--epochs", "1", "--validation", "0.1", "--test", "0.1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    words = ["go", "run", "wait", "stop", "come", "look"]
    lines = [f"{a.title()} {b} {n}!\t{a}们{b}{n}。" for a in words for b in words for n in range(4)]
    path.write_text("no tab here\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A folder, and what its training printed."""
    out = tmp_path_factory.mktemp("model") / "deep" / "model"
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        train = ["train", "--data", str(data), "--out", str(out), *TINY, "--tensorboard"]
        assert cli.main(train) == 0
    return out, printed.getvalue(), errors.getvalue()


@pytest.fixture
def model(trained):
    return trained[0]


def said(capsys, *arguments, code=0):
    """Standard output and error of one command."""
    try:
        returned = cli.main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        returned = stopped.code
    assert returned == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(capsys, *arguments):
    """The one line a wrong command is answered with."""
    out, err = said(capsys, *arguments, code=2)
    assert out == ""
    assert err.count("\n") == 1, err
    assert "error: " in err
    return err


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["train", "translate", "evaluate", "plot"])
def test_help_teaches(command, capsys):
    out, err = said(capsys, command, "--help")
    assert err == ""
    assert f"python -m bahdanau_fast {command}" in out.split("examples:")[1]
    assert "(default: " in out
    assert max(map(len, out.splitlines())) <= 100
    assert ("translates every sentence to the same few words" in out) == (command == "train")


def test_train_tells_what_it_does(trained):
    folder, out, err = trained
    scores = r"loss \d\.\d{3}, BLEU \d+\.\d\d, chrF \d+\.\d\d"
    assert re.fullmatch(
        r"116 training pairs \(14 for validation, 14 for test\), words to characters, "
        r"\d+ and \d+ tokens; [\d,]+ parameters, attention backend \w+\n"
        r"epoch 1/1  loss \d\.\d{3}  [\d,]+ tokens/s\n"
        rf"  validation: {scores}; the best so far\n"
        rf"wrote {folder}/ in \d+ s, [\d,]+ target tokens/s\n"
        rf"best\.pt is epoch 1, the best by validation loss \({scores}\)\n",
        out,
    )
    assert err == "skipped 1 malformed line (line 1: no tab)\n"
    assert {p.name for p in folder.iterdir()} == {"best.pt", "last.pt", "tensorboard"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    tags = ("train/loss", "train/tokens_per_second", "train/learning_rate")
    measured = ("validation/loss", "validation/bleu", "validation/chrf")
    assert set(board.Tags()["scalars"]) == {*tags, *measured}
    assert len(board.Scalars("train/loss")) == 8


TRAININGS = {
    "train": ("training.runs.Run.train", [*TINY, "--limit", "300"]),
    "demo": ("cli.demo.train", ["--quick"]),
}


@pytest.mark.parametrize("command", TRAININGS)
@pytest.mark.parametrize(
    ("rates", "policy", "noted"),
    [
        ({1: 90.0, 2: 3.0}, None, "2 threads take 30 times as long as one; OMP_NUM_THREADS=1"),
        ({1: 90.0, 2: 3.0}, "passive", None),  # what helps is there
        ({1: 90.0, 2: 150.0}, None, None),
    ],
)
def test_busy_cores_are_said_before_a_training(
    command, rates, policy, noted, tmp_path, capsys, monkeypatch, threads
):
    threads(2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(cores, "_products", rates.get)
    training, options = TRAININGS[command]
    monkeypatch.setattr(f"bahdanau_fast.seq2seq.{training}", stop)
    *notes, _ = said(capsys, command, "--out", tmp_path, *options, code=130)[1].splitlines()
    assert len(notes) == (noted is not None)
    assert all(noted in note for note in notes)


def test_to_ask_whether_cores_are_busy_changes_nothing(monkeypatch, threads):
    threads(2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(cores, "_SECONDS", 0.01)
    assert re.match("$|note: .* 2 threads take", cores.busy())
    assert torch.get_num_threads() == 2


def test_train_as_a_script_goes_on(data, tmp_path, capsys):
    train = ["train", "--data", data, "--out", tmp_path, *TINY, "--best-metric", "chrf"]
    out, _ = said(capsys, *train, "--json")
    first = json.loads(out)
    assert (first["steps"], first["text"]["data"]) == (8, "pairs.tsv")
    moved = tmp_path / "moved.tsv"
    moved.write_bytes(data.read_bytes())
    again = ["train", "--resume", "--out", tmp_path, "--data", moved, "--epochs", "2"]
    line = refused(capsys, *again, "--best-metric", "loss", "--lr", "1")
    left_out = "--lr and --best-metric must be left out with --resume"
    assert line.endswith(f"{left_out}, which keeps the training's settings\n")
    out, _ = said(capsys, *again, "--json")
    second = json.loads(out)
    assert second["steps"] == 16
    assert second["settings"] == {**first["settings"], "epochs": 2}
    assert second["validations"][:1] == first["validations"] == [first["best"]]
    assert second["best"] == max(second["validations"], key=lambda v: (v["chrf"], -v["loss"]))
    out, _ = said(capsys, *again[:-1], "3")
    assert "\nwrote " in out
    chosen = r"best.pt is epoch \d, the best by validation chrF \(loss "
    assert re.search(chosen, out)
    before = (tmp_path / "last.pt").read_bytes()
    out, _ = said(capsys, *again[:-2])
    assert re.search(rf"backend \w+\nall epochs are done \(3\); --epochs N goes on\n{chosen}", out)
    assert (tmp_path / "last.pt").read_bytes() == before


def test_an_interrupted_training_says_how_to_go_on(data, tmp_path, capsys, monkeypatch):
    train = ["train", "--out", tmp_path, *TINY]
    with monkeypatch.context() as patch:
        patch.setattr("bahdanau_fast.seq2seq.training.runs.Run._after_step", stop)
        _, err = said(capsys, *train, "--data", data, code=130)
    *_, line = err.splitlines()
    assert line == f"bahdanau_fast: interrupted; --resume --out {tmp_path} goes on"
    assert "epoch 1/1  loss" in said(capsys, "train", "--resume", "--out", tmp_path)[0]


@pytest.mark.parametrize(
    "options",
    [
        ["--attention", "none", "--cell", "lstm", "--no-bidirectional"],
        ["--attention", "dot", "--num-layers", "2", "--schedule", "constant"],
        ["--bf16", "--label-smoothing", "0.2"],
        ["--bf16", "--cell", "lstm", "--attention", "dot", "--validation", "0"],
    ],
)
def test_every_kind_of_model_trains_and_translates(data, tmp_path, capsys, options):
    said(capsys, "train", "--data", data, "--out", tmp_path, *TINY, *options)
    out, _ = said(capsys, "translate", tmp_path, "go run 1", "wait!", "--json")
    rows = json.loads(out)
    assert [row["source_tokens"] for row in rows] == [["go", "run", "1"], ["wait", "!"]]
    for row in rows:
        assert row["translation"] == "".join(row["tokens"])
        looked, read = row["attention"], len(row["source_tokens"])
        assert looked is None if "none" in options else len(looked) == len(row["tokens"])
        assert all(len(weights) == read for weights in looked or ())


def test_made_up_dates_are_the_default(tmp_path, capsys):
    out, _ = said(capsys, "train", "--out", tmp_path, *TINY, "--limit", "300", "--seed", 2**65)
    assert "characters to characters" in out
    out, _ = said(capsys, "evaluate", tmp_path, "--split", "validation", "--json", "--beam", "1")
    figures = json.loads(out)
    assert (figures["pairs"], figures["file"]) == (30, "dates")


def test_translate_reads_the_standard_input(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Go run 1!\n\nunheard of\n"))
    out, err = said(capsys, "translate", model, "--beam", "2")
    assert out.count("\n") == 3
    assert out.split("\n")[1] == ""
    assert err == "note: not in the vocabulary, read as <unk>: unheard of\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert said(capsys, "translate", model) == ("", "")


TEN = "go run wait stop come look go run wait stop"  # as many as the model reads: no <eos>


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_what_a_long_sentence_loses_is_said(model, capsys, json_too):
    assert said(capsys, "translate", model, TEN, *json_too)[1] == ""
    err = said(capsys, "translate", model, "heard go", f"{TEN} come gone come", *json_too)[1]
    assert err == (
        "note: not in the vocabulary, read as <unk>: heard\n"
        "note: cut to the model's 10 tokens, without: come gone\n"
    )


@pytest.mark.parametrize("beam", ["1", "3"])
def test_the_weights_of_a_row_in_json_sum_to_one(model, capsys, beam):
    out, _ = said(capsys, "translate", model, "go run 1!", TEN, "--json", "--beam", beam)
    short, long = json.loads(out)
    assert len(short["end_attention"]) == len(short["tokens"]) > 0
    rows = zip(short["attention"], short["end_attention"], strict=True)
    sums = [sum(row) + end for row, end in rows]
    assert sums == pytest.approx([1] * len(sums), abs=3e-4)  # rounded to four digits
    assert long["end_attention"] is None


def test_evaluate(model, data, capsys):
    out, err = said(capsys, "evaluate", model)
    assert "14 pairs (test)" in out
    assert out.count(" -> ") == 10
    assert "tok:zh" in out
    assert err == "skipped 1 malformed line (line 1: no tab)\n"
    out, _ = said(capsys, "evaluate", model, "--first", "5", data, "--json", "--samples", "2")
    figures = json.loads(out)
    assert (figures["pairs"], figures["part"], len(figures["samples"])) == (5, "all", 2)
    assert figures["samples"][0]["source"] == "Go go 0!"
    assert 0 <= figures["bleu"] <= 100
    assert figures["course_bleu_above_0.8"] <= figures["course_bleu_above_0"] <= 5


def test_plot(model, tmp_path, capsys):
    picture, curve = tmp_path / "a", tmp_path / "loss.png"
    out, err = said(capsys, "plot", model, "--out", picture, "Go run 们!", "Wait go 2!")
    assert out == f"wrote {picture}\n"
    assert ("no font here draws 们" in err) != plots.drawable("们")
    out, err = said(capsys, "plot", model, "--out", curve, "--json")
    assert json.loads(out) == {"wrote": str(curve), "note": ""}
    assert err == ""
    for path in (picture, curve):
        assert path.read_bytes()[:4] == b"\x89PNG"
    before = picture.read_bytes()
    line = refused(capsys, "plot", model, "Go!", "--out", picture)
    assert "--overwrite replaces the file" in line
    assert picture.read_bytes() == before
    said(capsys, "plot", model, "Go!", "--out", picture, "--overwrite")
    assert picture.read_bytes() != before


def test_a_translation_to_nothing_is_not_plotted(model, tmp_path, capsys, monkeypatch):
    nothing = Translation(["go"], [], torch.zeros(0, 1))
    monkeypatch.setattr(actions.Translator, "translate", lambda *_: [nothing])
    line = refused(capsys, "plot", model, "Go", "--out", tmp_path / "a.png")
    assert line.endswith("error: the model translated 'Go' to nothing; train longer\n")


def test_plot_writes_a_page_without_what_draws(model, tmp_path, capsys, monkeypatch):
    for module in ("matplotlib", "sacrebleu"):
        monkeypatch.setitem(sys.modules, module, None)
    page = tmp_path / "attention.html"
    plot = ["plot", model, "Go run 1!", "Wait go 2!", "--html", page]
    assert said(capsys, *plot) == (f"wrote {page}\n", "")
    before = page.read_bytes()
    assert b'"source":["go","run","1","!","<eos>"]'.replace(b"<", rb"\u003c") in before
    assert "--html must be a new path (--overwrite" in refused(capsys, *plot)
    said(capsys, *plot, "--overwrite", "--beam", "1")
    assert page.read_bytes().count(b'"steps":[]') == 2 > before.count(b'"steps":[]')


def test_overwrite_begins_anew(data, tmp_path, capsys):
    for name in (checkpoints.LAST, checkpoints.BEST):
        (tmp_path / name).write_bytes(b"of another training")
    none = ["--validation", "0", "--overwrite"]  # so no epoch is called the best
    out, _ = said(capsys, "train", "--data", data, "--out", tmp_path, *TINY, *none)
    assert "last.pt is the last epoch; no validation pairs, so there is no best one\n" in out
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    assert len(checkpoints.load(tmp_path / checkpoints.LAST)["losses"]) > 0


@pytest.mark.parametrize(
    ("arguments", "said_so"),
    [
        (["train"], "--out"),
        (["train", "--out", "MODEL", "--data", "DATA"], "--resume continues it, --overwrite rep"),
        (["train", "--out", "MODEL", "--data", "{gone}", "--overwrite"], "be a readable file"),
        (["train", "--out", "{free}", "--data", "{one}"], "min_freq must leave tokens to learn"),
        (["train", "--out", "{free}", "--lr", "inf"], "must be finite, got inf"),
        (["train", "--out", "{free}", "--epochs", "1.5"], "must be a whole number, got '1.5'"),
        (["train", "--out", "{file}", "--data", "DATA"], "--out must be a folder"),
        (["train", "--out", "{free}", "--data", "DATA", "--epochs", "0"], "at least 1"),
        (["train", "--out", "{free}", "--data", "DATA", "--lr", "0"], "lr must be above 0"),
        (["train", "--out", "{free}", "--data", "DATA", "--dropout", "2"], "between 0 and 1"),
        (["train", "--out", "{free}", "--data", "DATA", "--cell", "rnn"], "invalid choice"),
        (["train", "--out", "{free}", "--data", "DATA", "--test", "1"], "something to train on"),
        (["train", "--out", "{free}", "--resume"], "checkpoint must exist"),
        (["train", "--out", "{free}", "--resume", "--overwrite"], "not allowed with"),
        (["train", "--out", "{broken}", "--resume"], "be a complete file written by train"),
        (["train", "--out", "MODEL", "--resume", "--lr", "1"], "--lr must be left out"),
        (["translate", "{free}", "hi"], "hold best.pt or last.pt"),
        (["translate", "{file}", "hi"], "be a complete file written by train"),
        (["translate", "MODEL", "hi", "--beam", "0"], "at least 1"),
        (["translate", "MODEL", "hi", "--length-penalty", "nan"], "at least 0"),
        (["evaluate", "MODEL", "{gone}"], "data must be a readable file"),
        (["evaluate", "MODEL", "--split", "most"], "invalid choice"),
        (["plot", "MODEL", ""], "at least one token"),
        (["plot", "MODEL", "--html", "{free}/a.html"], "--html must come with at least one"),
        (["plot", "MODEL", "Go!", "--html", "a", "--out", "b"], "not allowed with argument"),
        (["plot", "MODEL", "Go!", "--out", "{gone}/a.png"], "No such file"),
        (["plot", "MODEL", "Go!", "--out", "{free}/a.gone"], "gone"),
        (["plot", "MODEL", "Go!", "--out", "{free}/a", "--font", "{file}"], "(it holds no font)"),
        (["plot", "MODEL", "Go!", "--out", "{free}/a", "--font", "{gone}"], "gone (No such file"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, said_so, model, data, tmp_path, capsys):
    names = {name: tmp_path / name for name in ("free", "file", "one", "gone", "broken")}
    for name in ("free", "broken"):
        names[name].mkdir()
    names["one"].write_text("Go.\tVa !\n")
    names["file"].write_text("x")
    (names["broken"] / "last.pt").write_bytes(b"PK\x03\x04 cut off")
    before = {path: path.read_bytes() for path in model.glob("*.pt")}
    words = {"DATA": str(data), "MODEL": str(model)}
    line = refused(capsys, *(words.get(word, word).format(**names) for word in arguments))
    assert said_so in line
    assert not list(names["free"].iterdir())
    assert {path: path.read_bytes() for path in model.glob("*.pt")} == before


TRANSLATE, PLOT = ["translate", "DIR", "hi"], ["plot", "DIR"]
RESUME = ["train", "--resume", "--out", "DIR"]
# Wrong values of each part (None: it is missing), and the commands that read it.
PARTS = [
    ("settings", (None, {"colour": "red"}), [TRANSLATE, RESUME]),
    ("text", (None, [1]), [TRANSLATE, RESUME]),
    ("kinds", (None, 3), [TRANSLATE]),
    ("source_vocab", (None,), [TRANSLATE, RESUME]),
    ("target_vocab", (3,), [TRANSLATE, RESUME]),
    ("model", (None, [1], {"encoder": 3}), [TRANSLATE, RESUME]),
    ("digest", (None,), [RESUME]),
    ("processes", (None,), [RESUME]),
    ("optimizer", (None, [1]), [RESUME]),
    ("schedule", (3,), [RESUME]),
    ("losses", (None, [1.0]), [RESUME, PLOT]),
    ("validations", (None, []), [RESUME, PLOT]),
    ("validations", ([3],), [PLOT]),
]


@pytest.mark.parametrize(
    ("key", "value", "commands"),
    [(key, value, commands) for key, values, commands in PARTS for value in values],
)
def test_a_checkpoint_without_a_part_or_with_another(key, value, commands, model, tmp_path, capsys):
    for name in (checkpoints.LAST, checkpoints.BEST):
        payload = checkpoints.load(model / name)
        del payload[key]
        checkpoints.save(payload | ({} if value is None else {key: value}), tmp_path / name)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said_so = rf"checkpoint must be a complete file written by train, got {tmp_path}/\w+.pt \("
    lack = f"without '{key}'" if value is None else "its contents do not fit: "
    for command in commands:
        line = refused(capsys, *(tmp_path if word == "DIR" else word for word in command))
        assert re.search(said_so + re.escape(lack), line), line
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("module", ["sacrebleu", "tensorboard", "matplotlib"])
def test_what_is_not_installed_is_said_first(module, model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    train = ["train", "--data", data, "--out", tmp_path / "out", *TINY, "--tensorboard"]
    line = refused(capsys, *(["plot", model, "Go!"] if module == "matplotlib" else train))
    assert re.search(rf"needs? {module}: pip install {module}$", line)
    assert not (tmp_path / "out").exists()


def test_cuda_where_there_is_none(model, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device must be available to this torch" in refused(
        capsys, "translate", model, "hi", "--device", "cuda"
    )
