"""Only torch.compile imports torch._dynamo, which is slow. Dynamo then skips frames of existing units."""

from tests.processes import output_of_python

UNIT_THEN_COMPILE = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import fsdp_c

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = fsdp_c.FullyShardedDataParallel(torch.nn.Linear(2, 2), use_orig_params=True)
model(torch.ones(1, 2)).sum().backward()
model.state_dict()
assert "torch._dynamo" not in sys.modules

compiled = torch.compile(model, backend="eager")
compiled(torch.ones(1, 2)).sum().backward()
from torch._dynamo.trace_rules import check_file
assert check_file(fsdp_c.fully_sharded_data_parallel.__file__).skipped
from torch._dynamo import utils
tried = {one.co_filename for one in utils.get_compilation_metrics() if one.co_filename}
ours = fsdp_c.__path__[0] + "/"
assert tried and not [name for name in tried if name.startswith(ours)], tried
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("fsdp_c")]
print("compiled")
"""


def test_dynamo_is_imported_by_torch_compile_and_skips_our_frames():
    assert output_of_python("-c", UNIT_THEN_COMPILE) == "compiled\n"
