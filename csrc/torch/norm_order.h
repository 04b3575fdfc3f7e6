/* How torch's own CPU build adds up a norm: found out by asking it, because the compiler that built it decides. */
#ifndef FSDP_TORCH_NORM_ORDER_H
#define FSDP_TORCH_NORM_ORDER_H

#include "kernels/kernels.h"

/* Set vector_nbytes and fused_tail so that kernel_norms gives torch's results on a set of probes, or vector_nbytes to 0, which
 * makes it answer STATUS_UNSUPPORTED, if it does not with any setting. No exception is left behind. */
void norm_order_probe(struct kernel_stream *stream);

#endif
