"""What a type checker sees of the package, as strict as it can be."""

import shutil
import venv
from pathlib import Path

import pytest
import torch
from fresh import build_package, copy_tree, python

SCRIPT = """\
import torch
from torch import Tensor
from typing_extensions import assert_type

import bahdanau_fast as bf

x = torch.zeros(2, 3, 4)
attention = bf.AdditiveAttention(8, activation="relu", negative_slope=0.1)
assert_type(attention(x, x, x), Tensor)
assert_type(attention(x, x, x, mask=x > 0), Tensor)
assert_type(attention.attention_weights, Tensor | None)
assert_type(attention.activation, str)
assert_type(attention.attend(x, attention.memory(x)), Tensor)
assert_type(bf.MLPAttention(8, 4)(x, x, value=x), Tensor)
assert_type(bf.DotProductAttention()(x, x, x), Tensor)
location = bf.LocationAttention(4, 4, 8)
assert_type(location(x, x, x, x), Tensor)
assert_type(location.attention_weights, Tensor | None)
pooling = bf.AttentionPooling(4, 8, gated=True)
assert_type(pooling(x), Tensor)
assert_type(pooling(x, return_scores=True), tuple[Tensor, Tensor, Tensor])
assert_type(bf.AttentionGRU(4, 8)(x, keys=x)[0], Tensor)
assert_type(bf.AttentionLSTM(4, 8).attention_weights, Tensor | None)
assert_type(bf.additive_scores(x, x, None, None, x[0, :1]), Tensor)
"""
WRONG = """
attention(x)
attention(x, x, x, masks=None)
attention.attention_weights.shape
bf.AdditiveAttention(8, activation=torch.relu)
"""
# Parts of torch that no annotation of ours leads to are not read, which would take half a minute.
UNREAD = "_dynamo", "_functorch", "_inductor", "ao", "distributed", "fx", "jit", "onnx", "utils"
CONFIG = f"""
[mypy]
strict = True
follow_imports = silent
pretty = False
[mypy-{",".join(f"torch.{name}.*" for name in UNREAD)},numpy.*,sympy.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
CODES = ["call-arg", "call-arg", "union-attr", "call-overload"]


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What was read of torch already, which takes most of the time."""
    return tmp_path_factory.mktemp("read")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_of_a_users_script(kind, read, tmp_path):
    pytest.importorskip("mypy", reason="pip install --group lint")
    script, config = tmp_path / "script.py", tmp_path / "config"
    script.write_text(SCRIPT + WRONG)
    config.write_text(CONFIG)
    skip = {"BAHDANAU_FAST_CPU": "0", "BAHDANAU_FAST_CUDA": "0"}
    wheel, _ = build_package(copy_tree(tmp_path / "tree"), f"build_{kind}", **skip)
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    users = ["--python-executable", str(tmp_path / "venv/bin/python"), "--config-file", str(config)]
    command = ["-m", "mypy", *users, "--cache-dir", str(read), str(script)]
    done = python(*command, cwd=tmp_path, check=False)
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    codes = [line.rsplit("[")[-1].rstrip("]") for line in found]
    assert codes == CODES, done.stdout + done.stderr
