"""The folder for the Hugging Face Hub, as `kernels` loads it: without and beside the package."""

import re
from pathlib import Path

from fresh import HIDE, ROOT, forked

import bahdanau_fast

CARD = re.search(r"```python\n(.*?)```", (ROOT / "hub/CARD.md").read_text(), re.DOTALL)[1]
PROGRAM = f"""{HIDE.format(hidden=["bahdanau_fast"])}
import kernels, pathlib
folder = pathlib.Path(sys.argv[1])
kernels.get_kernel = lambda *_, **__: kernels.get_local_kernel(folder)
{CARD}
digest = kernels.get_loaded_kernels()[0].metadata.digest
digest.validate(type(digest).hash_variant(digest.algorithm, folder / "build/torch-cpu"))
assert all(hasattr(bf, name) for name in bf.__all__)
q, k = attention.W_q(queries)[:, :, None], attention.W_k(keys)[:, None]
scores = torch.tanh(q + k) @ attention.w_v.weight[0]
expected = scores.masked_fill(torch.arange(50) >= lens[:, None, None], -torch.inf).softmax(-1)
torch.testing.assert_close((weights, context), (expected, expected @ keys))
with bf.backends.use("triton"):
    torch.testing.assert_close(attention(queries, keys, keys, lens), context)
sys.meta_path.pop(0)  # the package can be found from here on
sys.path.insert(0, sys.argv[2])
import bahdanau_fast
w = attention.W_q.weight, attention.W_k.weight, attention.w_v.weight[0]
beside, _ = bahdanau_fast.additive_attention(queries, keys, keys, *w, lens, backend="cpu")
torch.testing.assert_close(beside, expected @ keys)
"""


def test_the_card_runs_without_and_beside_the_package(tmp_path):
    forked("file", ROOT / "hub/write.py", tmp_path / "hub")
    folders = tmp_path / "hub", Path(bahdanau_fast.__file__).parents[1]
    where = {"cwd": tmp_path, "path": tmp_path}  # else the folder kernels/ is taken for `kernels`
    done = forked("-c", PROGRAM, *folders, TRITON_INTERPRET="1", **where)
    assert "a copy from the Hub has the Triton kernels only" in done.stderr
