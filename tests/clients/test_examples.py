"""The examples for other libraries, each run on two ranks with the real library.

For libraries that restrict FSDP to GPUs, the shims of the other tests are applied on CPUs.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from tests.clients.support import ON_CPU, ROOT, environment, require, train_reference
from tests.processes import output_of_script, run_python

require("accelerate", "lightning", "peft", "transformers", "trl", "bitsandbytes")

LIBRARY = "examples"
EXAMPLES = ROOT / "examples"
computes_on_the_cpu = pytest.mark.skipif(not ON_CPU, reason="the example computes on the CPU")
LAUNCH = """
import gc
import os
import sys
from lightning.pytorch import strategies
from torch.nn.parallel import DistributedDataParallel
import fsdp_c
from tests.clients.lightning_models import on_cpu
from tests.clients.support import gpus_that_are_cpus

_, implementation, *sys.argv = sys.argv
source = open(sys.argv[0]).read()
kept = []
if implementation == "fsdp_c":
    fsdp_c.install()
    gpus_that_are_cpus()
    strategies.FSDPStrategy = on_cpu(strategies.FSDPStrategy)
else:
    strategies.FSDPStrategy = lambda **options: strategies.DDPStrategy()
    source = source.replace('"fsdp": True', '"fsdp": False')
    initialize = DistributedDataParallel.__init__

    def initialize_and_keep(self, *arguments, **options):
        kept.append(self)
        initialize(self, *arguments, **options)

    DistributedDataParallel.__init__ = initialize_and_keep
exec(compile(source, sys.argv[0], "exec"), {"__name__": "__main__"})
wrapped = any(isinstance(one, fsdp_c.FullyShardedDataParallel) for one in gc.get_objects())
sys.stdout.write(f"wrapped by fsdp_c: {wrapped}\\n")  # in one piece, beside the other rank's
sys.stdout.flush()
if kept:
    # Destroying DDP's reducer, or the interpreter, can deadlock or abort: gloo's threads still drop tensors.
    os._exit(0)
"""


def with_library(
    folder: Path, implementation: str, script: str, *arguments: str, **settings: str
) -> list[float]:
    """Return the losses of a script for GPUs, run with fsdp_c or with DDP instead."""
    launch = folder / "launch.py"
    launch.write_text(LAUNCH)
    settings["ACCELERATE_USE_CPU"] = str(ON_CPU)
    command = (implementation, str(EXAMPLES / script), *arguments)
    output = output_of_script(launch, *command, cwd=folder, **settings)
    assert output.count(f"wrapped by fsdp_c: {implementation == 'fsdp_c'}") == 2, output
    return losses_in(output)


def losses_in(output: str) -> list[float]:
    """Return the losses printed by scripts or logged by the Trainer."""
    found = re.findall(r"loss (\d\.\d+)", output)
    found += [ast.literal_eval(entry)["loss"] for entry in re.findall(r"\{'loss'.*?\}", output)]
    assert len(found) >= 4, output
    return [float(loss) for loss in found]


def accelerate_settings() -> dict[str, str]:
    """Return the environment that `accelerate launch` derives from the config file."""
    from accelerate.commands import launch
    from accelerate.utils import launch as settings

    command = ["--config_file", str(EXAMPLES / "accelerate_fsdp.yaml"), "accelerate_fsdp.py"]
    arguments, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(command))
    assert arguments.num_processes == 2
    made = settings.prepare_multi_gpu_env(arguments)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.mark.parametrize(
    "command", ["accelerate_fsdp.py", "lightning_fsdp.py", "trl_trainers.py sft", "trl_trainers.py dpo"]
)
def test_losses_are_those_of_models_that_are_not_sharded(command, tmp_path):
    cache = {"HF_HOME": str(tmp_path / "cache")}
    settings = accelerate_settings() if command.startswith("accelerate") else {}
    found = with_library(tmp_path, "fsdp_c", *command.split(), **cache, **settings)
    expected = with_library(tmp_path, "ddp", *command.split(), **cache)
    # TRL rounds the losses
    assert found == pytest.approx(expected, abs=2e-4 if command.startswith("trl") else 1e-5)


@computes_on_the_cpu
# PEFT reads the deprecated property of transformers
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_beside_4_bit_weights_train_as_unsharded(tmp_path):
    losses = losses_in(output_of_script(EXAMPLES / "qlora.py", cwd=tmp_path))
    example = runpy.run_path(str(EXAMPLES / "qlora.py"))
    model = example["build_model"](torch.device("cpu"))
    four_bits = [param for param in model.parameters() if type(param).__name__ == "Params4bit"]
    assert len(four_bits) == 14 and {param.dtype for param in four_bits} == {torch.uint8}

    def loss_of(model, step):
        tokens = torch.cat([example["batch"](step, rank) for rank in range(2)])
        return model(input_ids=tokens, labels=tokens).loss

    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    assert losses == pytest.approx(train_reference(model, loss_of, range(4), optimizer=optimizer), rel=1e-5)


def test_workflow_without_gpu_passes_on_fsdp_c_and_not_on_torchs_fsdp1(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("torch finds an accelerator here")
    workflow = yaml.safe_load((EXAMPLES / "ci_without_gpu.yml").read_text())
    (first, *command) = shlex.split(workflow["jobs"]["test"]["steps"][-1]["run"])
    assert first == "torchrun"
    quiet = environment(PYTEST_ADDOPTS="-p no:cacheprovider")
    done = run_python("-m", "torch.distributed.run", *command, cwd=EXAMPLES, **quiet)
    assert done.returncode == 0 and done.stdout.count("1 passed") == 2, done.stdout + done.stderr[-2000:]
    plain = [word for word in command if word not in ("fsdp_c", "run")]
    plain = [word for at, word in enumerate(plain) if not (word == "-m" and plain[at - 1] == "-m")]
    done = run_python("-m", "torch.distributed.run", *plain, cwd=EXAMPLES, **quiet)
    assert done.returncode != 0 and "no accelerator device is detected" in done.stdout
