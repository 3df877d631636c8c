"""Set-up of the test session: one thread, ranks forked from a warm server, ended when the session ends.

A test that takes longer than the `timeout` in pyproject.toml fails; `run_on_ranks` has its own, shorter one.
"""

import os
import tempfile
from fnmatch import fnmatchcase

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
_checked = tempfile.TemporaryDirectory(prefix="colonnade-policies-")  # of this session and its ranks, not of the user
os.environ["COLONNADE_CACHE"] = _checked.name

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from colonnade.testing import ranks  # noqa: E402

torch.set_num_threads(1)
settings.register_profile(
    "colonnade", deadline=None, derandomize=True
)  # the machine may be slow, the examples the same
settings.load_profile("colonnade")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(items):
    """Of a matrix with a sample, all other cases are long."""
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None and not any(fnmatchcase(item.callspec.id, pattern) for pattern in sample.args):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish(session):
    needed = any(
        {"run_on_ranks", "on_ranks"} & vars(item.module).keys() for item in session.items if hasattr(item, "module")
    )
    if needed and not session.config.option.collectonly:
        ranks.preload()  # its imports go on in the background while the first tests run


def pytest_sessionfinish(session, exitstatus):
    ranks.close_pools()
