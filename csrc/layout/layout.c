#include "layout/layout.h"

#include <stddef.h>

#include "base/memory.h"

static int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static bool spec_is_valid(const struct layout_spec *spec) {
    if (spec->num_params < 1 || spec->num_params > (INT64_MAX - 1) / 2 || spec->aligned_numel < 0)
        return false;
    if (spec->world_size < 1 || spec->rank < 0 || spec->rank >= spec->world_size)
        return false;
    for (int64_t param = 0; param < spec->num_params; param++)
        if (spec->param_numels[param] < 0)
            return false;
    return true;
}

static enum status layout_alloc(struct flat_layout *layout) {
    const size_t num_params = (size_t)layout->num_params;
    /* one pad before each parameter and one at the end, at most */
    layout->segments = mem_new_array(2 * num_params + 1, sizeof *layout->segments);
    layout->param_segments = mem_new_array(num_params, sizeof *layout->param_segments);
    layout->shard_ranges = mem_new_array(num_params, sizeof *layout->shard_ranges);
    const bool complete = layout->segments && layout->param_segments && layout->shard_ranges;
    return complete ? STATUS_OK : STATUS_NO_MEMORY;
}

/* Append a segment. False when the total would not fit into int64_t. */
static bool append_segment(struct flat_layout *layout, int64_t numel, int64_t param) {
    if (numel > INT64_MAX - layout->numel)
        return false;
    layout->segments[layout->num_segments++] =
        (struct layout_segment){.offset = layout->numel, .numel = numel, .param = param};
    layout->numel += numel;
    return true;
}

static bool append_padding(struct flat_layout *layout, int64_t divisor) {
    const int64_t excess = layout->numel % divisor;
    return excess == 0 || append_segment(layout, divisor - excess, LAYOUT_PADDING);
}

static enum status place_segments(struct flat_layout *layout, const struct layout_spec *spec) {
    const bool aligned = spec->aligned_numel > 0;
    for (int64_t param = 0; param < spec->num_params; param++) {
        /* Each pad precedes a parameter, even an empty one; no alignment pad follows the last parameter. */
        if (aligned && !append_padding(layout, spec->aligned_numel))
            return STATUS_INVALID;
        layout->param_segments[param] = layout->num_segments;
        if (!append_segment(layout, spec->param_numels[param], param))
            return STATUS_INVALID;
    }
    /* A total divisible by the world size saves the reduce-scatter a copy. NO_SHARD is padded alike. */
    return !aligned || append_padding(layout, spec->world_size) ? STATUS_OK : STATUS_INVALID;
}

static enum status place_shards(struct flat_layout *layout) {
    const int64_t world_size = layout->sharded ? layout->world_size : 1;
    const int64_t index = layout->sharded ? layout->rank : 0;
    /* torch.chunk gives each chunk numel / world_size elements, rounded up; the last may be short or empty */
    layout->shard_numel = layout->numel / world_size + (layout->numel % world_size != 0);
    if (layout->shard_numel > INT64_MAX / world_size)
        return STATUS_INVALID;
    layout->padded_numel = layout->shard_numel * world_size;
    layout->shard_start = layout->shard_numel * index;
    layout->shard_numel_valid = min_i64(max_i64(layout->numel - layout->shard_start, 0), layout->shard_numel);
    layout->shard_numel_padded = layout->shard_numel - layout->shard_numel_valid;
    for (int64_t param = 0; param < layout->num_params; param++)
        layout->shard_ranges[param] = layout_shard_range(layout, param, layout->rank);
    return STATUS_OK;
}

enum status layout_init(struct flat_layout *layout, const struct layout_spec *spec) {
    *layout = (struct flat_layout){0};
    if (!spec_is_valid(spec))
        return STATUS_INVALID;
    layout->num_params = spec->num_params;
    layout->world_size = spec->world_size;
    layout->rank = spec->rank;
    layout->sharded = spec->sharded;
    enum status status = layout_alloc(layout);
    if (status == STATUS_OK)
        status = place_segments(layout, spec);
    if (status == STATUS_OK)
        status = place_shards(layout);
    if (status != STATUS_OK)
        layout_fini(layout);
    return status;
}

void layout_fini(struct flat_layout *layout) {
    mem_free(layout->segments);
    mem_free(layout->param_segments);
    mem_free(layout->shard_ranges);
    *layout = (struct flat_layout){0};
}

struct layout_shard_range layout_shard_range(const struct flat_layout *layout, int64_t param, int64_t rank) {
    const int64_t shard_start = layout->sharded ? layout->shard_numel * rank : 0;
    const int64_t shard_end = shard_start + layout->shard_numel;
    const int64_t param_start = layout_param_offset(layout, param);
    const int64_t param_end = param_start + layout_param_numel(layout, param);
    /* An empty parameter at the shard's first element is not in the shard, only one strictly inside. FSDP1's
     * inclusive intervals give the same flag, and checkpoints compare it. */
    if (param_end <= shard_start || param_start >= shard_end)
        return (struct layout_shard_range){0};
    const int64_t first = max_i64(param_start, shard_start);
    return (struct layout_shard_range){
        .in_shard = true,
        .offset_in_shard = first - shard_start,
        .numel_in_shard = min_i64(param_end, shard_end) - first,
        .offset_in_param = first - param_start,
    };
}
