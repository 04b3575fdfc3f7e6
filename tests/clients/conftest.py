"""Imports libraries once, in the process from which ranks are forked. Each test module has its own ranks.

Libraries keep state per process, and import slowly.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ON_RANKS = ("accelerate", "transformers", "lightning", "peft")


def pytest_configure(config: pytest.Config) -> None:
    """PEFT imports bitsandbytes, which initialises CUDA, and a process that has done so cannot be forked."""
    from tests import processes

    preload = [name for name in ON_RANKS if name != "peft" or config.getoption("device") == "cpu"]
    processes.PRELOAD.extend(name for name in preload if name not in processes.PRELOAD)


@pytest.fixture(scope="module", autouse=True)
def own_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the ranks of the module's library."""
    from tests import ranks

    yield
    ranks.close_pools(request.module.LIBRARY)
