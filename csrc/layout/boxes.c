#include "layout/boxes.h"

/* Return the outermost dimension whose rows are whole from `start` on: all inner indices are 0 at `start`,
 * and one row ends at or before `end`. */
static int outermost_dim(const int64_t *shape, int ndim, int64_t start, int64_t end, int64_t *row_numel) {
    int dim = ndim - 1;
    *row_numel = 1;
    while (dim > 0) {
        const int64_t numel = *row_numel * shape[dim];
        if (start % numel != 0 || end - start < numel)
            break;
        *row_numel = numel;
        dim--;
    }
    return dim;
}

int64_t box_at(const int64_t *shape, int ndim, int64_t start, int64_t end, struct box *box) {
    int64_t row_numel;
    const int cut_dim = outermost_dim(shape, ndim, start, end, &row_numel);
    int64_t rows = (end - start) / row_numel;
    int64_t index = start / row_numel;
    for (int dim = ndim - 1; dim > cut_dim; dim--) {
        box->offsets[dim] = 0;
        box->sizes[dim] = shape[dim];
    }
    for (int dim = cut_dim; dim >= 0; dim--) {
        box->offsets[dim] = index % shape[dim];
        box->sizes[dim] = 1;
        index /= shape[dim];
    }
    if (cut_dim < 0)
        return 1; /* a 0-D tensor has one element */
    const int64_t rows_left = shape[cut_dim] - box->offsets[cut_dim];
    rows = rows < rows_left ? rows : rows_left;
    box->sizes[cut_dim] = rows;
    return rows * row_numel;
}
