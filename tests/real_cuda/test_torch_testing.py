"""torch.testing's checks of FSDP1 on CUDA and NCCL, with fsdp_c in FSDP1's place."""

from __future__ import annotations

from tests.real_cuda.programs import run


def test_torchs_own_checks_of_training_pass() -> None:
    """Four models in six settings, moved to the device before and after wrapping, are compared with replicas."""
    for status, said in run("torchs_checks"):
        assert status == 0 and "passed: 48" in said, said[-3000:]
