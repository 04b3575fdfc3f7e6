/* The simulated device's process groups, for Python. */
#pragma once

#include <pybind11/pybind11.h>

namespace simulated_gpu {

/* Add ProcessGroupNCCL and its options to the module. */
void bind_nccl(pybind11::module_ &module);

} // namespace simulated_gpu
