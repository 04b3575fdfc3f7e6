/* torch.ops.fsdp_c.*: the kernels as custom ops, visible to the dispatcher, the profiler, opcheck and torch.compile. */
#ifndef FSDP_TORCH_OPS_H
#define FSDP_TORCH_OPS_H

/* Register the schemas with their CPU and Meta kernels, once per process. 0, or -1 with ImportError. Needs torch_abi_init. */
int ops_init(void);

#endif
