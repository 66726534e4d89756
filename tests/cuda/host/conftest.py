"""What the tests of kernels on the host share."""

import pytest
from cuda_on_host import Drivers, Host


@pytest.fixture(scope="module")
def drivers():
    """The kernels under AddressSanitizer and UBSan; what they see fails the test."""
    running = Drivers(lambda kind: Host(kind, "address"))
    yield running
    running.close()
