"""The command line as a user meets it."""

import io
import os
import subprocess
import sys

import pytest
import torch
from fresh import ROOT, python

import bahdanau_fast
from bahdanau_fast import backends, cli
from bahdanau_fast.check import check, problems


def test_info_in_a_fresh_process():
    result = python("-OO", "-W", "ignore", "-m", "bahdanau_fast", "info", path=ROOT)
    assert result.stderr == ""
    for text in (bahdanau_fast.__version__, torch.__version__, "auto takes", "reference"):
        assert text in result.stdout


@pytest.mark.parametrize("policy", [None, "passive"])
def test_info_names_what_helps_on_a_busy_machine(policy, monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert cli.main(["info"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("threads")]
    assert "OMP_WAIT_POLICY=passive" in line
    assert ("OMP_NUM_THREADS=1" in line) == (policy is None)


def test_check_covers_every_backend(capsys):
    passed = check()
    printed = capsys.readouterr().out
    assert printed.count("\n") >= len(backends.available()) * len(problems.CASES) * 4
    assert passed == ("FAIL" not in printed)
    assert passed, printed


@pytest.mark.parametrize(("factor", "said"), [(1 + 1e-4, "FAIL\n"), (float("nan"), "inf")])
def test_check_fails_on_a_wrong_answer(factor, said, monkeypatch, capsys):
    right = problems.results

    def wrong(backend, problem):
        context, *others = right(backend, problem)
        return [context if backend == "reference" else context * factor, *others]

    monkeypatch.setattr(problems, "results", wrong)
    monkeypatch.setattr("bahdanau_fast.check.CASES", problems.CASES[-2:-1])
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.endswith("FAIL\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--",), "bahdanau_fast: error: a command is missing, one of info, check, demo, train,"),
        (("trian",), "unknown command 'trian'; did you mean train?"),
        (("dance",), "unknown command 'dance' (see --help)"),
        (("--epochs", "3"), "unknown option --epochs (options follow their command)"),
        (("train", "--out", "m", "--epocs", "3"), "unknown option --epocs; did you mean --epochs?"),
        (("train", "--output=m"), "bahdanau_fast train: error: unknown option --output; did you "),
        (("translate", "m", "--bream", "3"), "unknown option --bream; did you mean --beam?"),
        (("info", "--loud"), "bahdanau_fast info: error: unknown option --loud (see --help)"),
        (("info", "loud"), "bahdanau_fast info: error: unknown arguments: loud"),
        (("demo", "--epochs", "0"), "argument --epochs: must be at least 1, got 0"),
        (("demo", "--epochs", "many"), "must be a whole number, got 'many'"),
        (("demo", "--seed", "-1"), "argument --seed: must be at least 0, got -1"),
    ],
)
def test_wrong_use_is_one_line_that_names_what_was_likely_meant(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "error: " in captured.err
    assert said in captured.err


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: python -m bahdanau_fast ")
    assert "to begin with:\n" in captured.err
    assert "bahdanau_fast: error: a command is missing, one of info," in captured.err


def test_words_behind_two_dashes_are_no_options(capsys):
    assert cli.main(["translate", "--", "nowhere", "--epocs"]) == 2
    assert "DIR must hold best.pt or last.pt" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["python -m bahdanau_fast", "bahdanau-fast"])
@pytest.mark.parametrize("command", ["info", "check", "demo", "train"])
def test_help_names_the_program_as_it_is_called(command, program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: {program} {command} ")
    assert "pytorch" not in out


def test_a_folder_that_cannot_be_made_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        assert cli.main(["demo", "--out", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert "--out must be a folder" in captured.err
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("command", ["demo", "train"])
def test_a_folder_that_cannot_be_written_to_is_said_before_any_work(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    more = ["--data", str(tmp_path / "gone.tsv")] * (command == "train")
    assert cli.main([command, "--out", str(tmp_path / "deep/out"), *more]) == 2
    out, err = capsys.readouterr()
    actual = f"{tmp_path}/deep/out ({tmp_path} is read-only)\n"
    assert (out, err.partition(", got ")[2]) == ("", actual)
    assert "--out must be a folder that can be written to" in err


@pytest.mark.parametrize("name", ["attention.png", "loss.png", "demo.json"])
def test_the_demo_overwrites_nothing_without_saying_so(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("mine")
    demo = ["demo", "--out", str(tmp_path)]
    assert cli.main(demo) == 2
    said = f"--out must hold no demo, got {tmp_path} (--overwrite replaces it)\n"
    assert capsys.readouterr() == ("", f"bahdanau_fast: error: {said}")
    assert (tmp_path / name).read_text() == "mine"
    monkeypatch.setattr("bahdanau_fast.seq2seq.cli.demo.train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([*demo, "--overwrite"])


@pytest.mark.skipif(sys.platform != "linux", reason="a file that is always full")
@pytest.mark.parametrize(
    ("argument", "full", "unbuffered"),
    [
        *(("info", full, unbuffered) for full in (True, False) for unbuffered in (False, True)),
        ("--help", False, False),
    ],
)
def test_output_that_nobody_takes(argument, full, unbuffered, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    taker, buffering = "/dev/full" if full else writer, 0 if unbuffered else -1
    with (
        open(taker, "wb", buffering) as binary,
        io.TextIOWrapper(binary, write_through=unbuffered) as stdout,  # at its end it is flushed
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main([argument]) == (2 if full else 141)
    said = "bahdanau_fast: error: [Errno 28] No space left on device\n" if full else ""
    assert capsys.readouterr().err == said


@pytest.mark.skipif(sys.platform != "linux", reason="of signals")
def test_a_process_whose_output_nobody_takes_ends_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-W", "ignore", "-m", "bahdanau_fast", "info"]
    with open(writer, "wb") as pipe:
        done = subprocess.run(
            command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_missing_matplotlib_is_said_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "pip install matplotlib\n" in captured.err
    assert not (tmp_path / "out").exists()
