"""Writes surface_rows.md: which test covers which row of docs/behaviour.md. Run as ``python -m
tests.surface_rows``.

A row is covered by the tests that name its id (in a comment or docstring of the test, or in the module's
docstring), by a test that is named here, or has a reason here. What has neither is written as open.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS / "surface_rows.md"
ID = r"[ABCDEFGX]-\d{3}"
BEHAVIOUR = TESTS.parent / "docs" / "behaviour.md"
SHORT = {  # as the table below calls them
    "construction": "unit/test_construction.py",
    "on_ranks": "distributed/test_construction_on_ranks.py",
    "wrap": "unit/test_wrap.py",
    "layout": "unit/test_layout.py",
    "summon": "distributed/test_summon.py",
    "clip": "distributed/test_clip.py",
    "memory": "distributed/test_memory.py",
    "state": "distributed/test_state_dict.py",
    "sharded": "distributed/test_sharded_state_dict.py",
    "training": "distributed/test_training.py",
    "parity": "parity/test_parity.py",
    "differences": "parity/test_differences.py",
    "exceptions": "distributed/test_exceptions.py",
    "forward": "distributed/test_forward_methods.py",
    "calls": "distributed/test_collective_calls.py",
    "order": "distributed/test_execution_order.py",
    "errors": "unit/test_errors.py",
    "hybrid": "distributed/test_hybrid.py",
    "orig": "distributed/test_use_orig_params.py",
    "offload": "distributed/test_offload.py",
    "ops": "unit/test_runtime_ops.py",
}

BY_HAND = """
A-001 construction::test_package_exports_the_names_of_torch_fsdp1
A-012 reason: api.py has the two tuples that this design reads; the map between the enums is one constructor call,
    A-011
A-019 construction::test_lazy_initialisation_casts_buffers_to_the_innermost_dtype
    state::test_saved_dict_under_mixed_precision_equals_torchs
A-030 construction::test_constructor_has_the_signature_of_torch
A-032 reason: an order of private steps; each step has its row
A-033 construction::test_wrapping_a_container_without_forward_warns
A-034 construction::test_original_parameters_keep_their_names_behind_the_wrappers
A-036 construction::test_group_of_one_rank_switches_to_no_shard_and_warns
    construction::test_no_shard_on_several_ranks_is_deprecated
A-038 wrap::test_functional_policy_wraps_as_the_policy_object_does wrap::test_children_get_the_arguments_of_the_root
A-040 construction::test_both_kinds_of_ignored_states_are_refused
    construction::test_outer_unit_ignores_what_an_inner_one_ignores
A-041 construction::test_meta_module_is_initialised_by_param_init_fn_once_per_module
A-042 construction::test_cpu_is_a_device_like_any_other errors::test_construction_refuses
A-043 on_ranks::test_sync_module_states_gives_all_ranks_the_values_of_rank_0
A-044 parity::test_training_equals_torch calls::test_each_prefetch_mode_changes_the_order_and_nothing_else
A-045 construction::test_units_that_differ_in_a_common_setting_are_refused
A-046 construction::test_units_that_differ_in_a_common_setting_are_refused
A-048 construction::test_cpu_is_a_device_like_any_other
    construction::test_device_that_is_not_there_is_refused_and_named
A-060 construction::test_module_sees_through_a_checkpoint_wrapper
A-062 construction::test_unknown_attributes_and_indices_are_those_of_the_wrapped_module
    construction::test_attribute_of_an_unfinished_unit_does_not_recurse
A-064 construction::test_asking_for_the_root_decides_nothing
A-065 construction::test_units_are_listed_outer_first_and_once construction::test_asking_for_the_root_decides_nothing
A-068 on_ranks::test_apply_sees_and_keeps_full_parameters
A-069 on_ranks::test_model_cast_between_steps_trains_on_in_its_new_dtype
    construction::test_changing_the_dtype_changes_the_flat_parameter_and_all_that_shows_it
A-070 construction::test_training_state_starts_idle
A-073 construction::test_copying_or_pickling_says_what_to_do_instead
A-080 parity::test_training_equals_torch
A-081 construction::test_unit_without_parameters_has_no_handle parity::test_training_equals_torch
A-082 parity::test_training_equals_torch differences::test_row_16_a_packed_sequence_is_cast
A-090 summon::test_without_recurse_only_the_unit_itself_is_shown summon::test_module_without_units_is_left_alone
A-091 summon::test_parameters_are_shown_in_full_precision_under_mixed_precision
A-092 summon::test_names_and_values_are_the_plain_models
A-093 summon::test_edits_persist_with_writeback_or_where_nothing_is_sharded
A-094 summon::test_rank0_only_shows_the_other_ranks_their_shards
A-095 summon::test_offload_to_cpu_shows_all_values_on_the_cpu_and_keeps_edits
    summon::test_copies_of_an_offload_carry_their_edits_back
A-096 summon::test_full_gradients_and_edits_of_them_equal_torchs
A-097 summon::test_nested_summon_is_refused_and_leaves_the_outer_one_intact summon::test_summon_in_forward_is_refused
A-099 summon::test_units_left_gathered_by_a_forward_stay_so
A-110 construction::test_no_sync_switches_every_unit_off_and_on_again
    construction::test_no_sync_on_an_inner_unit_is_refused
A-111 parity::test_training_equals_torch training::test_accumulation_equals_the_unsharded_model
A-112 clip::test_norm_and_clipped_gradients_equal_torchs clip::test_inner_unit_is_refused
A-113 clip::test_units_of_several_strategies_equal_torchs clip::test_unmanaged_gradients_count_once_as_torchs
A-114 clip::test_norm_and_clipped_gradients_equal_torchs
A-115 clip::test_rank_without_gradients_warns_and_returns_fp32
A-116 clip::test_low_precision_gradients_equal_torchs
A-117 clip::test_norm_after_an_infinity_norm_is_polluted_only_in_torch
A-130 state::test_selection_returns_the_previous_settings_and_warns
A-132 state::test_state_dict_type_is_restored_when_the_body_raises
A-133 state::test_units_that_disagree_are_refused
B-027 reason: gradients of offloaded parameters are handed over on the CPU directly; no second CPU gradient is kept
B-030 reason: the views are kept by the handle in C and returned again in every forward
B-032 reason: one node per unit and the hook on its anchor replace the AccumulateGrad hook of the flat parameter
B-033 reason: as B-032
B-036 errors::test_runtime_refuses
C-001 errors::test_flattening_refuses
C-005 reason: fields of private Python state; the state is the two enums in C
C-006 reason: the unsharded tensor is never made at construction, so no views of it are shown
C-011 errors::test_flattening_refuses
C-015 reason: log lines of upstream's developers
C-021 construction::test_scalar_parameter_is_refused_and_named
C-040 reason: the fields it sets are of the handle in C; B-023 to B-027
C-050 parity::test_training_equals_torch orig::test_edited_parameters_are_taken_over
C-051 parity::test_training_equals_torch memory::test_mixed_precision_holds_units_of_half_the_bytes
C-052 reason: param_state says it; the storage is not measured
C-053 parity::test_training_equals_torch
C-054 reason: which tensor is gathered into is decided where it is allocated, in C; A-091 shows the values
C-055 reason: a legal transition is looked up in a table; see the native tests
C-056 calls::test_forward_gathers_each_unit_once_e012
C-057 orig::test_parameter_objects_stay_the_same parity::test_training_equals_torch
C-058 memory::test_mixed_precision_holds_units_of_half_the_bytes
C-059 memory::test_construction_leaves_no_unsharded_storage
C-070 ops::test_views_have_the_shapes_strides_and_places_of_the_parameters
C-073 parity::test_training_equals_torch
C-075 summon::test_names_and_values_are_the_plain_models
C-076 orig::test_parameters_are_flat_shards_and_empty_outside_of_it
C-078 on_ranks::test_model_cast_between_steps_trains_on_in_its_new_dtype
C-079 on_ranks::test_model_cast_between_steps_trains_on_in_its_new_dtype
C-090 memory::test_full_shard_forward_holds_the_root_and_one_unit
C-093 offload::test_training_is_bitwise_that_without_offload
C-095 summon::test_copies_of_an_offload_carry_their_edits_back
    summon::test_offload_to_cpu_shows_all_values_on_the_cpu_and_keeps_edits
C-110 parity::test_training_equals_torch
C-111 parity::test_training_equals_torch
C-112 parity::test_training_equals_torch offload::test_training_is_bitwise_that_without_offload
C-113 clip::test_norm_and_clipped_gradients_equal_torchs
C-115 parity::test_training_equals_torch
C-116 summon::test_full_gradients_and_edits_of_them_equal_torchs
C-117 summon::test_full_gradients_and_edits_of_them_equal_torchs
C-143 reason: private assertions; the tables of legal transitions replace them
D-002 construction::test_asking_for_the_root_decides_nothing
    summon::test_summon_of_an_inner_unit_does_not_make_it_a_root
D-005 construction::test_units_that_differ_in_a_common_setting_are_refused
D-007 reason: priorities of CUDA streams; nothing to see on a CPU
D-008 errors::test_runtime_refuses
D-020 parity::test_training_equals_torch calls::test_collectives_and_computation_are_in_the_order_of_torch
D-022 construction::test_lazy_initialisation_casts_buffers_to_the_innermost_dtype
    construction::test_ignored_buffers_are_not_cast
D-023 parity::test_training_equals_torch
D-030 parity::test_training_equals_torch
D-031 parity::test_training_equals_torch
D-032 calls::test_collectives_and_computation_are_in_the_order_of_torch
D-033 calls::test_collectives_and_computation_are_in_the_order_of_torch
D-034 reason: a wait of the host for a device; nothing to wait for on a CPU
D-035 reason: as B-032
D-036 reason: as B-032; the node does not depend on the dtype of the data
D-037 parity::test_training_equals_torch
D-040 parity::test_training_equals_torch
D-041 memory::test_full_shard_forward_holds_the_root_and_one_unit
D-042 differences::test_row_4_evaluation_sees_the_optimizer_step_before_it
    memory::test_forward_without_gradients_leaves_nothing_gathered
D-043 differences::test_row_15_outputs_are_returned_as_they_were
D-045 memory::test_forward_without_gradients_leaves_nothing_gathered
D-046 differences::test_row_16_a_packed_sequence_is_cast
D-050 parity::test_training_equals_torch
D-051 parity::test_training_equals_torch
D-052 calls::test_collectives_and_computation_are_in_the_order_of_torch
D-053 differences::test_row_12_gradients_of_a_unit_trained_on_its_own_are_handed_over
D-054 differences::test_row_13_a_graph_can_be_walked_twice
D-055 differences::test_row_13_a_graph_can_be_walked_in_no_sync_and_then_reduced
D-060 parity::test_training_equals_torch
D-061 parity::test_training_equals_torch errors::test_runtime_refuses
D-062 calls::test_each_prefetch_mode_changes_the_order_and_nothing_else
D-063 parity::test_training_equals_torch
D-064 reason: the order of CUDA streams; nothing to see on a CPU
D-070 memory::test_full_shard_frees_units_in_no_sync_and_shard_grad_op_keeps_them
D-080 parity::test_training_equals_torch
D-081 parity::test_training_equals_torch
D-082 construction::test_predivide_factor_is_that_of_torch
D-087 parity::test_training_equals_torch
D-100 reason: as D-064
D-101 parity::test_training_equals_torch
D-102 exceptions::test_an_exception_leaves_no_unsharded_storage
D-103 parity::test_training_equals_torch
D-104 parity::test_training_equals_torch
D-111 reason: kept, by order_record_post_forward
D-113 calls::test_each_prefetch_mode_changes_the_order_and_nothing_else
D-114 calls::test_collectives_and_computation_are_in_the_order_of_torch
D-120 parity::test_training_equals_torch
D-121 parity::test_training_equals_torch state::test_names_skip_checkpoint_wrappers_around_and_inside_units
D-122 parity::test_training_equals_torch
D-124 parity::test_training_equals_torch
    training::test_frozen_unit_stays_and_the_others_train_like_the_unsharded_model
D-126 parity::test_training_equals_torch differences::test_row_3_offloaded_gradients_accumulate_outside_no_sync
D-129 reason: upstream's compile-time branches; the operators under torch.ops.fsdp_c are what is traced here
E-001 memory::test_construction_leaves_no_unsharded_storage
E-002 calls::test_forward_gathers_each_unit_once_e012
E-003 memory::test_full_shard_forward_holds_the_root_and_one_unit
    memory::test_shard_grad_op_keeps_every_unit_until_its_backward
E-004 memory::test_full_shard_forward_holds_the_root_and_one_unit
E-006 memory::test_forward_without_gradients_leaves_nothing_gathered
E-007 calls::test_backward_gathers_freed_units_and_reduces_every_unit_once_e013
E-008 memory::test_full_shard_backward_holds_the_root_the_unit_and_one_prefetched
E-009 memory::test_full_shard_frees_units_in_no_sync_and_shard_grad_op_keeps_them
E-010 calls::test_backward_gathers_freed_units_and_reduces_every_unit_once_e013
E-011 calls::test_no_sync_reduces_nothing_e014_and_the_next_step_all_at_once_e015
E-017 reason: as B-026
E-018 state::test_no_shard_warns_and_is_full_whatever_is_selected
F-001 state::test_saved_dict_equals_torchs_after_training
F-002 state::test_no_shard_warns_and_is_full_whatever_is_selected
    sharded::test_unit_that_shards_nothing_gives_whole_tensors
F-003 state::test_state_dict_of_an_inner_unit_does_not_make_it_a_root
    state::test_gradients_and_optimizer_views_survive_a_save
F-005 state::test_saved_dict_equals_torchs_after_training
F-006 state::test_names_skip_checkpoint_wrappers_around_and_inside_units
F-007 state::test_saved_dict_is_the_plain_models state::test_names_skip_checkpoint_wrappers_around_and_inside_units
F-008 state::test_values_own_their_memory sharded::test_saved_values_have_memory_of_their_own
F-020 state::test_rank0_only_leaves_other_ranks_what_no_unit_manages
F-021 state::test_rank0_only_leaves_other_ranks_what_no_unit_manages
F-022 state::test_rank0_only_leaves_other_ranks_what_no_unit_manages state::test_offload_on_cpu_gives_live_values
F-023 state::test_dict_loads_into_every_implementation
F-024 state::test_strict_load_names_missing_and_unexpected_keys_as_the_user_does
G-001 wrap::test_module_wrap_policy_wraps_every_instance_and_the_root wrap::test_policies_are_the_objects_of_torch
G-002 wrap::test_custom_policy_overrides_the_arguments_of_the_root
    wrap::test_custom_policy_that_answers_none_is_refused
G-003 wrap::test_policies_are_the_objects_of_torch wrap::test_lambda_policy_wraps_what_the_lambda_names
G-004 wrap::test_size_based_policy_wraps_what_is_large
G-005 wrap::test_functional_policy_wraps_as_the_policy_object_does
G-006 wrap::test_children_get_the_arguments_of_the_root
    wrap::test_ignored_parameters_of_the_root_are_ignored_by_children
G-007 wrap::test_auto_wrap_over_a_unit_is_refused_and_names_it
G-008 construction::test_hybrid_strategy_makes_the_pair_once_for_all_units
G-009 wrap::test_batch_norm_becomes_a_unit_without_mixed_precision
    wrap::test_full_precision_module_answers_in_the_dtype_of_its_input
G-010 wrap::test_partly_frozen_module_of_several_flat_parameters_gives_no_warning
    wrap::test_partly_frozen_module_with_original_parameters_warns_of_its_gradients
G-011 wrap::test_enable_wrap_builds_units_with_its_arguments
G-020 construction::test_outer_unit_ignores_what_an_inner_one_ignores
    construction::test_ignoring_the_wrapped_module_itself_warns
G-021 construction::test_ignored_parameter_stays_as_it_was
G-022 construction::test_buffers_of_ignored_modules_are_named_without_wrappers
    construction::test_ignored_buffers_are_not_cast
G-023 construction::test_hybrid_strategy_takes_a_pair_of_groups
    construction::test_hybrid_strategy_without_groups_is_refused
G-024 on_ranks::test_hybrid_strategy_by_policy_groups_the_ranks_of_a_node
G-030 errors::test_construction_refuses
G-031 errors::test_construction_refuses
G-032 errors::test_construction_refuses
G-034 construction::test_meta_module_is_initialised_by_reset_parameters
    construction::test_meta_module_without_reset_parameters_warns_of_its_type
G-036 on_ranks::test_sync_module_states_crosses_the_replicas_of_a_hybrid_strategy
G-037 errors::test_construction_refuses
G-038 errors::test_construction_refuses
G-039 offload::test_parameters_gradients_and_optimizer_state_are_on_the_cpu
G-041 construction::test_submodules_are_marked_for_dynamo_but_ignored_ones_are_not
G-042 construction::test_parameter_shared_by_two_units_is_refused_and_both_names_given
X-009 reason: works: no device_id and no accelerator means the CPU (parity 7)
X-048 reason: only a rank's own part is ever flattened, so that no storage is shared
X-067 reason: a moved module is initialised anew, which raises X-062
X-068 reason: a prefetch is decided in C; an illegal transition raises RuntimeError
X-070 reason: an illegal transition of the table raises RuntimeError
X-071 reason: shard and gradient are of one handle and one size
X-072 exceptions::test_steps_after_an_exception_are_as_if_it_never_happened
X-073 reason: there is no such hook state, B-032
X-078 reason: gradients are made on the compute device by the handle itself
X-081 reason: as C-143
X-083 differences::test_row_13_a_graph_can_be_walked_twice
X-087 reason: DMP only
X-116 reason: works: `_unshard` initialises the tree first; test_execution_order.py
X-104 reason: torch 2.6 only
X-130 state::test_selection_returns_the_previous_settings_and_warns
X-131 state::test_config_of_another_type_is_refused
X-132 state::test_units_that_disagree_are_refused
X-133 state::test_units_that_disagree_are_refused
X-135 state::test_no_shard_warns_and_is_full_whatever_is_selected
X-136 reason: a unit that shards nothing gives a full state dict whatever is called; the functions that could be called
    directly are not there
X-138 state::test_expected_name_missing_from_the_dict_is_named
X-139 reason: nothing is cloned that could point to freed memory: values are made from the shards
X-146 reason: the mesh of a DTensor is its own; tensors on other meshes are gathered by DTensor
X-147 reason: torch's extension raises it
X-169 reason: nothing is reconstructed: every rank's part is known from the layout
X-172 reason: a flat parameter without state is left out, as its optimizer would
X-182 reason: rank 0 sends tensors of the shapes it announced
X-183 reason: no profiler of its own; its ranges are those of D-130 and torch's
"""


def sections() -> Iterator[tuple[str, list[str]]]:
    """The title of each section of docs/behaviour.md that has rows to cover, and their ids."""
    for title, text in re.findall(
        r"^## ([ABCDEFGX]: .*?)$(.*?)(?=^## |\Z)", BEHAVIOUR.read_text(), re.MULTILINE | re.DOTALL
    ):
        yield title, re.findall(rf"^- \*\*({ID})\*\*", text, re.MULTILINE)


def ids_in(text: str) -> set[str]:
    """The ids in a text, ``C-002 to C-004`` taken as three."""
    found = set(re.findall(rf"\b({ID})", text))
    for letter, first, last in re.findall(r"\b([ABCDEFGX])-(\d{3}) to \1-(\d{3})", text):
        found.update(f"{letter}-{number:03}" for number in range(int(first), int(last) + 1))
    return found


def tests_by_id() -> dict[str, list[str]]:
    """The tests that name an id; the whole file where its first docstring does."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        head, *tests = re.split(r"^(?=(?:@.*\n)*def test_)", path.read_text(), flags=re.MULTILINE)
        docstring = re.match(r'"""(.*?)"""', head, re.DOTALL)
        for one in sorted(ids_in(docstring[1] if docstring else "")):
            found[one].append(name)
        body = head[docstring.end() :] if docstring else head
        rows = set(re.findall(r'Row\(\s*"(X-\d{3})', path.read_text()))
        for test in tests:
            title = re.search(r"^def (test_\w+)", test, re.MULTILINE)
            for one in sorted(ids_in(test) - rows):
                found[one].append(f"{name}::{title[1]}" if title else name)
        for one in sorted(rows | (ids_in(body) - rows)):
            found[one].append(name)
    return found


def by_hand() -> dict[str, list[str] | str]:
    """Tests, or a reason, per id."""
    entries: dict[str, list[str] | str] = {}
    for line in BY_HAND.strip().replace("\n    ", " ").splitlines():
        one, _, rest = line.partition(" ")
        if rest.startswith("reason: "):
            entries[one] = rest.removeprefix("reason: ")
            continue
        entries[one] = [
            f"{SHORT[test.partition('::')[0]]}::{test.partition('::')[2]}" for test in rest.split()
        ]
    return entries


def entry(one: str, found: dict[str, list[str]], hand: dict[str, list[str] | str]) -> str:
    given = hand.get(one, [])
    tests = list(dict.fromkeys(found.get(one, []) + (given if isinstance(given, list) else [])))
    if tests:
        return ", ".join(f"`{test}`" for test in tests[:3]) + (
            f" and {len(tests) - 3} more" if len(tests) > 3 else ""
        )
    return f"{given}" if isinstance(given, str) else "open"


def page() -> str:
    found, hand = tests_by_id(), by_hand()
    lines = [
        "# Rows of the surface, and the tests that cover them",
        "",
        "Written by `python -m tests.surface_rows`: a row of [docs/behaviour.md](../docs/behaviour.md) has "
        "tests that",
        "cover it, or the reason why this design has nothing of the kind. `open`: no test yet.",
        "",
    ]
    counts = []
    for title, ids in sections():
        rows = [(one, entry(one, found, hand)) for one in ids]
        still_open = sum(text == "open" for _, text in rows)
        counts.append(f"{title[0]} {still_open} of {len(rows)}")
        lines += [f"## {title}", "", "| row | test or reason |", "| --- | --- |"]
        lines += [f"| {one} | {text} |" for one, text in rows] + [""]
    lines.insert(4, f"Open: {', '.join(counts)}.\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
