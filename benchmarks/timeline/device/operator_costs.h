/* Costs of torch's operators by the model of time. */
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>

namespace simulated_gpu {

/* Return the time of an operator's floating-point operations in us, or 0 for an operator without any. */
double us_of_flops(const std::string &name, const c10::IValue *arguments);
int64_t num_launches(const c10::FunctionSchema &schema, const c10::IValue *arguments);
/* True for norms' backwards: CUDA reads their inputs for the input's gradient and for the weight's. */
bool reads_twice(const std::string &name);
/* True if the operator does not read the tensors that it writes. */
bool overwrites(const std::string &name);
/* True if the operator reads as many bytes as its result has. */
bool reads_what_it_gives(const std::string &name);

} // namespace simulated_gpu
