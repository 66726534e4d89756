"""All kernel tests but the contract table in Triton's interpreter."""

import interpreted
import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_others_in_the_interpreter():
    interpreted.passes(f"not {interpreted.CONTRACT}", 80)
