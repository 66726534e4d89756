"""torch.library.opcheck; tracing at symbolic sizes takes a hundred times as long as its rest."""

import torch

QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = (*QUICK, "test_aot_dispatch_dynamic")


def opcheck(operator, args, options=None, *, traced=True):
    """All of opcheck; ``traced=False`` where a call like it, of other sizes or dtype, is traced."""
    checks = TRACED if traced else QUICK
    torch.library.opcheck(operator, args, options, test_utils=checks)
