"""examples/weight_sync.py run as by a user: the engine has the weights of each step."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT, output_of_python

pytestmark = pytest.mark.slow


def test_engine_in_another_process_has_the_weights_of_each_step() -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/weight_sync.py"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said = output_of_python("-m", *command, cwd=ROOT, **settings)
    differences = [float(one) for one in re.findall(r"differ by (\S+)", said)]
    assert len(differences) == 4 and max(differences) < 1e-5
    losses = [float(one) for one in re.findall(r"loss (\S+),", said)]
    assert losses[-1] < losses[0] / 4
