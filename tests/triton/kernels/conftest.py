"""Tests of the Triton kernels: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be asked for before anything is imported: ../test_interpreted_*.py run this
folder so. Alone, it is ``TRITON_INTERPRET=1 python -m pytest tests/triton/kernels``.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        """A call from a kernel to a function: the language is patched already.

        The interpreter patches it again at each, which takes half of its time.
        """
        if "tl" not in self.fn.__globals__ and self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
elif torch.cuda.is_available():
    import parity

    parity.DEVICE = "cuda"
else:
    collect_ignore_glob = ["test_*.py"]
