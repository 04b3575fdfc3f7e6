/* links: layout/layout.c layout/exchange.c layout/partition.c layout/boxes.c base/memory.c */
/* Random layouts, boxes and exchanges, compared with models that process one element at a time. A trial
 * depends only on its number: FSDP_C_FUZZ_FIRST=N and FSDP_C_FUZZ_COUNT=1 repeat trial N.
 * pytest --exhaustive runs a million trials. */
#include "base/memory.h"
#include "harness.h"
#include "layout/boxes.h"
#include "layout/exchange.h"
#include "layout/layout.h"
#include "layout/partition.h"

enum { PARAMS = 7, WORLD = 6, DIMS = 4, TENSORS = 3, TENSOR_NUMEL = 40, ELEMENT_NBYTES = 8 };
enum { PIECE_NBYTES = TENSOR_NUMEL * ELEMENT_NBYTES };

static uint64_t state;
static long long trial;

static int64_t below(int64_t bound) {
    return random_below(&state, bound);
}

/* ---- layouts ---- */

typedef __int128 wide;

/* The expected layout, computed in 128 bits. */
struct model {
    wide offsets[PARAMS];
    wide numel, shard_numel;
};

static wide up(wide value, wide unit) {
    return unit ? (value + unit - 1) / unit * unit : value;
}

static struct model model_of(const struct layout_spec *spec) {
    struct model model = {.numel = 0};
    for (int64_t i = 0; i < spec->num_params; i++) {
        model.offsets[i] = up(model.numel, spec->aligned_numel);
        model.numel = model.offsets[i] + spec->param_numels[i];
    }
    if (spec->aligned_numel)
        model.numel = up(model.numel, spec->world_size);
    model.shard_numel = spec->sharded ? up(model.numel, spec->world_size) / spec->world_size : model.numel;
    return model;
}

static wide cut(wide value, wide low, wide high) {
    return value < low ? low : value > high ? high : value;
}

/* Check the intersection of a shard and a parameter. An empty parameter must be strictly inside the shard. */
static void check_range(const struct flat_layout *layout, const struct model *model, int64_t param,
                        int64_t rank) {
    const struct layout_shard_range range = layout_shard_range(layout, param, rank);
    const wide first = layout->sharded ? model->shard_numel * rank : 0, end = first + model->shard_numel;
    const wide begin = model->offsets[param], from = cut(begin, first, end),
               to = cut(begin + layout_param_numel(layout, param), first, end);
    const bool is_empty = layout_param_numel(layout, param) == 0;
    CHECK_EQUAL(range.in_shard, is_empty ? begin > first && begin < end : to > from);
    if (range.in_shard) {
        CHECK(range.offset_in_shard == from - first && range.numel_in_shard == to - from);
        CHECK(range.offset_in_param == from - begin);
    }
}

static void check_layout(const struct layout_spec *spec, const struct flat_layout *layout,
                         const struct model *model) {
    const wide start = spec->sharded ? model->shard_numel * spec->rank : 0;
    const wide valid = cut(model->numel - start, 0, model->shard_numel);
    int64_t end = 0, pads = 0;
    CHECK(layout->numel == model->numel && layout->shard_numel == model->shard_numel);
    CHECK(layout->padded_numel == model->shard_numel * (spec->sharded ? spec->world_size : 1));
    CHECK(layout->shard_start == start && layout->shard_numel_valid == valid);
    CHECK(layout->shard_numel_padded == model->shard_numel - valid);
    for (int64_t i = 0; i < layout->num_segments; end += layout->segments[i++].numel) {
        CHECK_EQUAL(layout->segments[i].offset, end);
        pads += layout->segments[i].param == LAYOUT_PADDING;
    }
    CHECK_EQUAL(end, layout->numel);
    CHECK_EQUAL(layout->num_segments - pads, spec->num_params);
    for (int64_t i = 0; i < spec->num_params; i++) {
        CHECK(layout_param_offset(layout, i) == model->offsets[i]);
        CHECK_EQUAL(layout_param_numel(layout, i), spec->param_numels[i]);
        check_range(layout, model, i, spec->rank);
        check_range(layout, model, i, below(spec->world_size));
    }
}

static int64_t size_up_to(int64_t largest) {
    return below(5) ? below(largest) : 0;
}

/* Check a layout of small sizes, where padding and shards meet, or of sizes that overflow 64 bits. */
static void fuzz_layout(void) {
    const bool huge = below(8) == 0;
    int64_t numels[PARAMS];
    struct layout_spec spec = {
        .param_numels = numels, .num_params = 1 + below(PARAMS), .sharded = below(4) > 0};
    for (int64_t i = 0; i < spec.num_params; i++)
        numels[i] = size_up_to(huge ? INT64_MAX >> below(40) : 30);
    spec.aligned_numel = size_up_to(huge ? INT64_MAX >> below(62) : 9);
    spec.world_size = 1 + below(huge ? INT64_MAX >> below(62) : WORLD);
    spec.rank = below(spec.world_size);
    const struct model model = model_of(&spec);
    struct flat_layout layout;
    const bool fails = below(8) == 0;
    mem_fail_at(fails ? 1 + (size_t)below(4) : 0);
    const enum status status = layout_init(&layout, &spec);
    mem_fail_at(0);
    if (fails && status == STATUS_NO_MEMORY)
        return;
    if (up(model.numel, spec.world_size) + spec.aligned_numel <= INT64_MAX / 2)
        CHECK_EQUAL(status, STATUS_OK);
    if (status == STATUS_OK) {
        check_layout(&spec, &layout, &model);
    } else {
        CHECK_EQUAL(status, STATUS_INVALID);
    }
    layout_fini(&layout);
}

/* ---- boxes ---- */

/* Return the flat index of element `index` of a box. */
static int64_t element_of(const struct box *box, const int64_t *shape, int ndim, int64_t index) {
    int64_t flat = 0, stride = 1;
    for (int dim = ndim - 1; dim >= 0; stride *= shape[dim--]) {
        flat += (box->offsets[dim] + index % box->sizes[dim]) * stride;
        index /= box->sizes[dim];
    }
    return flat;
}

static void fuzz_boxes(void) {
    const int ndim = (int)below(DIMS + 1);
    int64_t shape[DIMS], numel = 1;
    for (int dim = 0; dim < ndim; dim++)
        numel *= shape[dim] = 1 + below(5);
    int64_t start = below(numel), boxes = 0;
    const int64_t end = start + 1 + below(numel - start);
    for (struct box box; start < end; boxes++) {
        const int64_t size = box_at(shape, ndim, start, end, &box);
        CHECK(size > 0 && start + size <= end);
        for (int64_t i = 0; i < size; i++)
            CHECK_EQUAL(element_of(&box, shape, ndim, i), start + i);
        start += size;
    }
    CHECK(boxes <= (ndim ? 2 * ndim - 1 : 1));
}

/* ---- exchanges ---- */

static int64_t owner_of(const struct partition *partition, int64_t element) {
    return (element + partition->offset) / partition->step;
}

/* Return the position of byte `at` in the piece of its rank. */
static int64_t place_in_piece(const struct partition *partition, int64_t element_nbytes, int64_t at) {
    int64_t place = 0;
    for (int64_t before = 0; before < at; before++)
        place += owner_of(partition, before / element_nbytes) == owner_of(partition, at / element_nbytes);
    return place;
}

/* The source of one byte of a target piece, and its position there. */
struct arrival {
    int64_t source, place;
};

/* Compute the arrival of each byte at `rank`. Bytes are sent in the order of peer, tensor and position. */
static void expect_arrivals(const struct exchange_tensor *tensors, int64_t count, int64_t rank,
                            int64_t world_size, struct arrival arrivals[TENSORS][PIECE_NBYTES],
                            int64_t *received_nbytes) {
    int64_t received = 0;
    for (int64_t peer = 0; peer < world_size; peer++) {
        const int64_t before = received;
        for (int64_t i = 0; i < count; i++) {
            const struct exchange_tensor *tensor = &tensors[i];
            for (int64_t at = 0; at < tensor->source.numel * tensor->element_nbytes; at++) {
                const int64_t element = at / tensor->element_nbytes;
                if (owner_of(&tensor->source, element) != peer || owner_of(&tensor->target, element) != rank)
                    continue;
                arrivals[i][at] = (struct arrival){EXCHANGE_RECEIVED, received};
                if (peer == rank)
                    arrivals[i][at] =
                        (struct arrival){i + 1, place_in_piece(&tensor->source, tensor->element_nbytes, at)};
                else
                    received++;
            }
        }
        received_nbytes[peer] = received - before;
    }
}

static void check_parts(const struct exchange *plan, const struct exchange_tensor *tensors, int64_t count,
                        int64_t rank, struct arrival arrivals[TENSORS][PIECE_NBYTES]) {
    size_t part = 0;
    for (int64_t i = 0; i < count; i++) {
        const struct partition_range own = partition_of_rank(&tensors[i].target, rank);
        int64_t at = own.start * tensors[i].element_nbytes;
        for (int64_t parts_left = plan->part_counts[i]; parts_left > 0; parts_left--, part++) {
            const struct exchange_range *range = &plan->parts.items[part];
            for (int64_t byte = 0; byte < range->nbytes; byte++, at++) {
                CHECK_EQUAL(range->source, arrivals[i][at].source);
                CHECK_EQUAL(range->start + byte, arrivals[i][at].place);
            }
        }
        CHECK_EQUAL(at, own.end * tensors[i].element_nbytes);
    }
    CHECK_EQUAL(part, plan->parts.count);
}

/* Check that each sent byte is in the rank's source piece and in the peer's target piece, in the order of
 * tensors. */
static void check_sent(const struct exchange *plan, const struct exchange_tensor *tensors, int64_t rank,
                       int64_t world_size) {
    size_t at = 0;
    for (int64_t peer = 0; peer < world_size; peer++) {
        int64_t sent = 0;
        for (; sent < plan->sent_nbytes[peer]; at++) {
            const struct exchange_range *range = &plan->sent.items[at], *before = range - (sent > 0);
            CHECK(!sent || range->source > before->source || range->start > before->start);
            const struct exchange_tensor *tensor = &tensors[range->source];
            const int64_t begin = partition_of_rank(&tensor->source, rank).start * tensor->element_nbytes;
            CHECK(range->nbytes > 0 && range->start + range->nbytes <= plan->source_nbytes[range->source]);
            for (int64_t byte = 0; byte < range->nbytes; byte++)
                CHECK_EQUAL(owner_of(&tensor->target, (begin + range->start + byte) / tensor->element_nbytes),
                            peer);
            sent += range->nbytes;
        }
        CHECK_EQUAL(sent, plan->sent_nbytes[peer]);
        CHECK(peer != rank || sent == 0);
    }
    CHECK_EQUAL(at, plan->sent.count);
}

static struct partition random_partition(int64_t numel, int64_t world_size) {
    struct partition partition = {numel, 1, below(20)};
    partition.step = (numel + partition.offset) / world_size + 1 + below(10);
    return partition;
}

static void fuzz_exchange(void) {
    const int64_t world_size = 1 + below(WORLD), count = 1 + below(TENSORS), rank = below(world_size);
    struct exchange_tensor tensors[TENSORS];
    struct arrival arrivals[TENSORS][PIECE_NBYTES];
    int64_t received_nbytes[WORLD];
    struct exchange plan;
    for (int64_t i = 0; i < count; i++) {
        const int64_t numel = size_up_to(TENSOR_NUMEL);
        tensors[i] = (struct exchange_tensor){random_partition(numel, world_size),
                                              random_partition(numel, world_size), (int64_t)1 << below(4)};
    }
    const bool fails = below(4) == 0;
    mem_fail_at(fails ? 1 + (size_t)below(12) : 0);
    const enum status status = exchange_init(&plan, tensors, (size_t)count, rank, world_size, false);
    mem_fail_at(0);
    if (fails && status == STATUS_NO_MEMORY)
        return;
    CHECK_EQUAL(status, STATUS_OK);
    expect_arrivals(tensors, count, rank, world_size, arrivals, received_nbytes);
    for (int64_t peer = 0; peer < world_size; peer++)
        CHECK_EQUAL(plan.received_nbytes[peer], received_nbytes[peer]);
    check_parts(&plan, tensors, count, rank, arrivals);
    check_sent(&plan, tensors, rank, world_size);
    exchange_free(&plan);
}

/* Check the all-gather of whole tensors on rank 0: the pieces of each rank are back to back in rows of one
 * length. */
static void fuzz_gather(void) {
    const int64_t world_size = 1 + below(WORLD), count = 1 + below(TENSORS);
    int64_t row_begins[WORLD][TENSORS], longest = 0;
    struct exchange_tensor tensors[TENSORS];
    struct exchange plan;
    size_t part = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t numel = size_up_to(TENSOR_NUMEL);
        const struct partition on_rank_0 = {numel, numel ? numel : 1, 0};
        tensors[i] = (struct exchange_tensor){random_partition(numel, world_size), on_rank_0, 1 << below(4)};
    }
    for (int64_t peer = 0; peer < world_size; peer++) {
        int64_t end = 0;
        for (int64_t i = 0; i < count; i++) {
            const struct partition_range source_range = partition_of_rank(&tensors[i].source, peer);
            row_begins[peer][i] = end;
            end += (source_range.end - source_range.start) * tensors[i].element_nbytes;
        }
        longest = end > longest ? end : longest;
    }
    CHECK_EQUAL(exchange_init(&plan, tensors, (size_t)count, 0, world_size, true), STATUS_OK);
    CHECK_EQUAL(plan.sent.count, 0);
    for (int64_t i = 0; i < count; i++) {
        const int64_t scale = tensors[i].element_nbytes, nbytes = tensors[i].source.numel * scale;
        int64_t at = 0;
        for (int64_t parts_left = plan.part_counts[i]; parts_left > 0; parts_left--, part++)
            for (int64_t byte = 0; byte < plan.parts.items[part].nbytes; byte++, at++) {
                const int64_t peer = owner_of(&tensors[i].source, at / scale);
                CHECK_EQUAL(plan.parts.items[part].source, EXCHANGE_RECEIVED);
                CHECK_EQUAL(plan.parts.items[part].start + byte,
                            peer * longest + row_begins[peer][i] +
                                place_in_piece(&tensors[i].source, scale, at));
            }
        CHECK_EQUAL(at, nbytes);
        CHECK_EQUAL(plan.target_nbytes[i], nbytes);
    }
    exchange_free(&plan);
}

static void check_refused_exchanges(void) {
    const struct partition ten = {10, 3, 0};
    const struct exchange_tensor beyond_last_rank = {ten, {10, 2, 0}, 4}, other_numel = {ten, {11, 3, 0}, 4},
                                 too_large = {
                                     {INT64_MAX / 2, INT64_MAX / 4, 0}, {INT64_MAX / 2, INT64_MAX / 4, 0}, 8};
    struct exchange plan;
    CHECK_EQUAL(exchange_init(&plan, &beyond_last_rank, 1, 3, 4, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &other_numel, 1, 0, 4, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &too_large, 1, 0, 4, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &beyond_last_rank, 1, 4, 4, false), STATUS_INVALID);
    CHECK_EQUAL(partition_of_rank(&ten, INT64_MAX - 1).end, 0);
    CHECK_EQUAL(partition_of_rank(&ten, -1).end, 0);
    CHECK(!partition_is_valid(&(struct partition){INT64_MAX - 1, 2, 0}));
    CHECK(!partition_is_valid(&(struct partition){1, 0, 0}));
    CHECK(partition_is_valid(&(struct partition){INT64_MAX / 2, INT64_MAX / 2, 0}));
}

/* ---- trials ---- */

static long long number_of(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

/* Print the number of the trial in which a failed check has ended the program. */
static void print_trial(void) {
    if (trial >= 0)
        fprintf(stderr, "FSDP_C_FUZZ_FIRST=%lld FSDP_C_FUZZ_COUNT=1 repeats it\n", trial);
}

int main(void) {
    const long long first = number_of("FSDP_C_FUZZ_FIRST", 0);
    const long long count = number_of("FSDP_C_FUZZ_COUNT", 20000);
    check_refused_exchanges();
    atexit(print_trial);
    for (trial = first; trial < first + count; trial++) {
        state = (uint64_t)(trial + 1) * 0x9e3779b97f4a7c15u; /* not 0, a fixed point of xorshift */
        fuzz_layout();
        fuzz_boxes();
        fuzz_exchange();
        fuzz_gather();
        CHECK_EQUAL(mem_live_count(), 0);
    }
    trial = -1;
    printf("passed %lld trials\n", count);
    return 0;
}
