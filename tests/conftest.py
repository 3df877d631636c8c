"""Set-up of the test session: one thread, ranks forked from a warm server, ended when the session ends.

A test that takes longer than the `timeout` in pyproject.toml fails; `run_on_ranks` has its own, shorter one.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch  # noqa: E402

from colonnade.testing import ranks  # noqa: E402

torch.set_num_threads(1)


def pytest_sessionstart(session):
    if not session.config.option.collectonly:
        ranks.preload()  # imports go on in the background while tests are collected


def pytest_sessionfinish(session, exitstatus):
    ranks.close_pools()
