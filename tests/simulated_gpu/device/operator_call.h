/* A call of an operator of the device by the CPU's kernel on the same memory. Both fake GPUs derive from it.
 *
 *   arguments of the device -> tensors of the CPU -> the kernel -> results of the device
 *
 * Invariant: a result is an argument, a view of an argument's storage, or new memory of the device. */
#pragma once

#include <memory>
#include <unordered_map>

#include "held_operator.h"

namespace simulated_gpu {

class operator_call {
  public:
    operator_call(const c10::OperatorHandle &op, std::vector<c10::IValue> *values, c10::DeviceIndex current);
    virtual ~operator_call() = default;

  protected:
    const c10::OperatorHandle &op;
    const c10::FunctionSchema &schema;
    std::vector<c10::IValue> *stack;
    size_t first; /* index of the arguments on the stack */
    c10::Device device;
    /* owned while a stream captures: the operator for the graph */
    std::shared_ptr<held_operator> held;

    /* Set the device by the arguments. Raise if they are on several devices. */
    void find_device();
    /* The CPU's tensor for an argument of the device. */
    at::Tensor converted(const at::Tensor &tensor, const std::function<c10::Storage()> &make_storage);
    void hold_arguments();
    /* Fill `into` with the CPU's tensor at each replay. */
    void hold_fill(const at::Tensor &into, const at::Tensor &cpu);
    /* Replace the kernel's results on the stack, after resizing arguments that the kernel has resized. */
    void return_results();

    virtual void make_room_for(const at::Tensor &resized) = 0;
    virtual at::Tensor new_tensor(const at::Tensor &like) = 0;
    virtual void fill(const at::Tensor &into, const at::Tensor &cpu) = 0;

  private:
    /* by the CPU's tensor: the device's tensor, the CPU's */
    std::unordered_map<c10::TensorImpl *, std::pair<at::Tensor, at::Tensor>> originals;
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages; /* by the device's: the CPU's */
    std::unordered_map<c10::TensorImpl *, value_place> places;     /* by the CPU's tensor */

    void note_places(size_t begin, size_t end, bool are_results);
    void follow(const at::Tensor &original, const at::Tensor &cpu);
    at::Tensor from_cpu(const at::Tensor &cpu);
};

} // namespace simulated_gpu
