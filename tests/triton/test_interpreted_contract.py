"""The contract table in Triton's interpreter; the other kernel tests are in their own file."""

import interpreted
import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_contract_in_the_interpreter():
    interpreted.passes(interpreted.CONTRACT, 100)
