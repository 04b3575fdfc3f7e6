/* A unit's operations as torch custom ops, by the id of its handle: visible to the dispatcher, the profiler and opcheck. The step
 * itself calls the same functions without the dispatcher.
 *
 *   fsdp_c::unshard(Tensor(a!) full, int handle) -> ()        all-gather the unit; `full` holds its padded flat parameter
 *   fsdp_c::reshard(Tensor(a!) full, int handle) -> ()        free it again
 *   fsdp_c::unshard_views(Tensor(a) full, int handle) -> Tensor(a)[]   one view per parameter, differentiable
 *   fsdp_c::segment_views(Tensor(a) flat, int handle) -> Tensor(a)[]   the same below autograd: bare aliases, cheaply
 *
 * `full` is the handle's own padded_unsharded_flat_param, or any tensor of that size and dtype, which receives a copy. */
#ifndef FSDP_HANDLE_HANDLE_OPS_H
#define FSDP_HANDLE_HANDLE_OPS_H

#include "handle/handle.h"

int handle_ops_init(void); /* register the ops, once per process. 0, or -1 with ImportError */

#endif
