/* Shared by the CPU's pack and CUDA's: the arguments, their checks, and the loop nest of a strided source. */
#ifndef FSDP_KERNELS_PACK_H
#define FSDP_KERNELS_PACK_H

#include <stddef.h>

#include "kernels/kernels.h"

enum { PACK_MAX_NDIM = 64 /* torch's limit */ };

struct pack {
    char *output;
    enum dtype output_dtype;
    int64_t output_numel;
    const struct pack_source *sources;
    int64_t num_sources;
    double divisor;
    bool add; /* true to add to the output; gaps are then skipped */
    const struct kernel_stream *stream;
};

/* The dimensions of a strided copy, by descending output stride, merged where the strides of both sides
 * allow. */
struct plan {
    int32_t ndim;
    int64_t sizes[PACK_MAX_NDIM];
    int64_t input_strides[PACK_MAX_NDIM];
    int64_t output_strides[PACK_MAX_NDIM];
};

static inline void plan_insert(struct plan *plan, int64_t size, int64_t input_stride, int64_t output_stride) {
    int32_t d = plan->ndim++;
    for (; d > 0 && plan->output_strides[d - 1] < output_stride; d--) {
        plan->sizes[d] = plan->sizes[d - 1];
        plan->input_strides[d] = plan->input_strides[d - 1];
        plan->output_strides[d] = plan->output_strides[d - 1];
    }
    plan->sizes[d] = size;
    plan->input_strides[d] = input_stride;
    plan->output_strides[d] = output_stride;
}

static inline void plan_merge(struct plan *plan) {
    int32_t last = 0;
    for (int32_t d = 1; d < plan->ndim; d++) {
        int64_t size = plan->sizes[d];
        if (plan->input_strides[last] == plan->input_strides[d] * size &&
            plan->output_strides[last] == plan->output_strides[d] * size) {
            size *= plan->sizes[last];
        } else {
            last++;
        }
        plan->sizes[last] = size;
        plan->input_strides[last] = plan->input_strides[d];
        plan->output_strides[last] = plan->output_strides[d];
    }
    plan->ndim = last + 1;
}

static inline void plan_build(struct plan *plan, const struct pack_source *source) {
    const struct tensor_view *view = &source->view;
    int64_t contiguous = 1;
    plan->ndim = 0;
    for (int32_t d = view->ndim - 1; d >= 0; d--) {
        int64_t size = view->sizes[d];
        if (size != 1) {
            plan_insert(plan, size, view->strides ? view->strides[d] : contiguous,
                        source->output_strides ? source->output_strides[d] : contiguous);
        }
        contiguous *= size;
    }
    if (plan->ndim == 0)
        plan_insert(plan, 1, 1, 1);
    plan_merge(plan);
}

static inline bool plan_is_flat(const struct plan *plan) {
    return plan->ndim == 1 && plan->input_strides[0] == 1 && plan->output_strides[0] == 1;
}

/* Return true if `strides` are those of a contiguous tensor; NULL means contiguous. */
static inline bool strides_are_contiguous(const int64_t *strides, const struct tensor_view *view) {
    int64_t expected = 1;
    for (int32_t d = view->ndim - 1; strides && d >= 0; d--) {
        if (view->sizes[d] != 1 && strides[d] != expected)
            return false;
        expected *= view->sizes[d];
    }
    return true;
}

/* Return true for a contiguous source. This common case needs no plan. */
static inline bool source_is_flat(const struct pack_source *source) {
    return strides_are_contiguous(source->view.strides, &source->view) &&
           strides_are_contiguous(source->output_strides, &source->view);
}

static inline int64_t source_end(const struct pack_source *source) {
    return source->offset + source->numel;
}

/* Return true if the output strides describe a dense block: a permutation of a contiguous tensor. */
static inline bool output_is_dense(const struct pack_source *source) {
    struct plan plan;
    int64_t expected = 1;
    if (source->numel == 0 || strides_are_contiguous(source->output_strides, &source->view))
        return true;
    plan_build(&plan, source);
    for (int32_t d = plan.ndim - 1; d >= 0; d--) {
        if (plan.output_strides[d] != expected)
            return false;
        expected *= plan.sizes[d];
    }
    return expected == source->numel;
}

static inline enum status pack_check(const struct pack *pack) {
    int64_t position = 0;
    if ((unsigned)pack->output_dtype >= DTYPE_COUNT)
        return STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < pack->num_sources; i++) {
        const struct pack_source *source = &pack->sources[i];
        if (source->offset < position || source->numel < 0 || source_end(source) > pack->output_numel)
            return STATUS_INVALID;
        position = source_end(source);
        if (!source->view.data)
            continue;
        if ((unsigned)source->view.dtype >= DTYPE_COUNT)
            return STATUS_UNSUPPORTED;
        if (source->view.ndim > PACK_MAX_NDIM || !output_is_dense(source))
            return STATUS_INVALID;
    }
    return STATUS_OK;
}

#endif
