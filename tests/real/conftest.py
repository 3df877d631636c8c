"""Tests with real weights: minutes each, so they run when asked for (`pytest -m real tests/real`) and not otherwise."""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "real: trains a real model for minutes; run with: pytest -m real tests/real")


def pytest_collection_modifyitems(config, items):
    if "real" not in (config.option.markexpr or ""):
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; run with: pytest -m real tests/real"))
