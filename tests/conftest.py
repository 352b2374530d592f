"""Keeps Flower quiet and offline, and all state of a test session in a folder of its own."""

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_HOME", tempfile.mkdtemp(prefix="fedcomp-tests-"))

# The same examples in every run, so that a change is what breaks it; HYPOTHESIS_PROFILE=deep looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("deep", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads for tiny layers wait for each other, for minutes on a busy machine."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
