import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The worlds are tiny: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
