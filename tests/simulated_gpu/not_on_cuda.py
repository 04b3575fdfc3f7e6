"""Rank tests that cannot pass with ``--device cuda``, each with its reason.

The list is for the simulated GPU; torch's CUDA build (tests/real_cuda) runs some of the tests. Listed tests
are run too, and a listed test that passes is a failure: remove it from the list.
"""

from __future__ import annotations

import pytest

from tests import real_cuda

NO_SPARSE = "the operators of both devices take no sparse tensors"
NO_PHILOX = "a generator of the simulated GPU has the CPU's state, in which DTensor finds no offset"
PLACES = "where a group has gloo beside NCCL, torch says that shards on a GPU are on the CPU"
NO_COPY = "torch's own cannot copy a ShardedTensor that requires a gradient to the CPU"
NO_WORK = "collectives over NCCL run on the current stream and return no work to fail in"
NO_TIMEOUT = "a timeout of collectives is not simulated"
LENGTHS = "lengths of packed sequences are on the CPU, always"
ON_CPU = "it is about models on a CPU"
NO_CELLS = "torch's CPU build has no kernels of a GPU's recurrent cells"
TRITON = "TRL's losses are Triton kernels, which torch's CUDA build without a GPU does not load"
RACE = "torch's own adds such gradients while a reduction on another stream writes there"

REASONS: dict[str, dict[str, str]] = {
    "tests/clients/test_examples.py": {
        "test_losses_are_those_of_models_that_are_not_sharded[trl_trainers.py sft]": TRITON,
        "test_losses_are_those_of_models_that_are_not_sharded[trl_trainers.py dpo]": TRITON,
    },
    "tests/distributed/test_backward.py": {
        "test_recurrent_modules_train_like_the_plain_model": NO_CELLS,
    },
    "tests/distributed/test_checkpoint.py": {
        "test_what_torch_saved_loads_here[fsdp1-True]": PLACES,
        "test_what_torch_saved_loads_here[fsdp1-False]": PLACES,
    },
    "tests/distributed/test_dcp_state_dict.py": {
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-orig-default]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-orig-without frozen]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-orig-flattened]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-orig-not strict]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-flat-default]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-flat-without frozen]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-flat-flattened]": PLACES,
        "test_what_is_got_equals_torchs_and_what_is_set_comes_back[sharded tensors-flat-not strict]": PLACES,
    },
    "tests/distributed/test_errors_of_one_rank.py": {
        "test_error_is_raised_before_the_collective_and_names_the_rank[sparse_gradient]": NO_SPARSE,
    },
    "tests/distributed/test_process_exit.py": {
        "test_a_rank_whose_collective_failed_ends_with_its_own_error": NO_TIMEOUT,
    },
    "tests/distributed/test_recover.py": {
        "test_all_units_are_reset_when_a_prefetch_failed[orig]": NO_WORK,
        "test_all_units_are_reset_when_a_prefetch_failed[flat]": NO_WORK,
        "test_sparse_gradient_is_refused_with_rank_unit_parameter_and_remedy": NO_SPARSE,
    },
    "tests/distributed/test_sharded_grad_scaler.py": {
        "test_duplicates_of_a_sparse_fp16_gradient_are_added_before_the_check": NO_SPARSE,
    },
    "tests/distributed/test_sharded_state_dict.py": {
        "test_sharded_values_and_their_metadata_equal_torchs[orig-False-False]": PLACES,
        "test_sharded_values_and_their_metadata_equal_torchs[flat-False-False]": PLACES,
        "test_sharded_values_and_their_metadata_equal_torchs[orig-False-True]": PLACES,
        "test_sharded_values_and_their_metadata_equal_torchs[flat-False-True]": PLACES,
        "test_local_dict_equals_torchs[orig-True]": NO_COPY,
        "test_local_dict_equals_torchs[flat-True]": NO_COPY,
    },
    "tests/distributed/test_tensor_parallel.py": {
        "test_meta_module_is_initialised_after_it_was_parallelized": NO_PHILOX,
    },
    "tests/distributed/test_weight_penalties.py": {
        "test_terms_made_before_the_forward_give_torchs_gradients": RACE,
    },
    "tests/parity/test_differences.py": {
        "test_offloaded_optimizer_state_equals_the_state_on_the_device": ON_CPU,
        "test_the_cpu_is_a_device_like_others[no device]": ON_CPU,
        "test_the_cpu_is_a_device_like_others[no device, sync]": ON_CPU,
        "test_the_cpu_is_a_device_like_others[no device, offload]": ON_CPU,
        "test_the_cpu_is_a_device_like_others[sync]": ON_CPU,
        "test_the_cpu_is_a_device_like_others[offload]": ON_CPU,
        "test_a_packed_sequence_is_cast": LENGTHS,
    },
}

RUN_ON_CUDA_BUILD = {  # there, generators and operators of sparse tensors are torch's
    "test_sparse_gradient_is_refused_with_rank_unit_parameter_and_remedy",
    "test_meta_module_is_initialised_after_it_was_parallelized",
}


def reason(nodeid: str) -> str | None:
    """Return the reason why a test cannot pass, by its full name or by the name of the function for all its
    cases.
    """
    file, _, name = nodeid.partition("::")
    of_file = REASONS.get(file, {})
    if real_cuda.is_on() and name.partition("[")[0] in RUN_ON_CUDA_BUILD:
        return None
    return of_file.get(name, of_file.get(name.partition("[")[0]))


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        why = reason(item.nodeid)
        if why is not None:
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))
