/* A CPU operator on the device's memory, held to run later, any number of times. */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

#include "cpu_tensors.h"

namespace simulated_gpu {

/* Position of a tensor among the values of an operator. */
struct value_place {
    bool is_result;
    size_t value, element;
};

class held_operator {
  public:
    using is_of_device = std::function<bool(const at::Tensor &)>;

    /* `arguments` are those of the CPU kernel. Tensors that are not on the device are copied, like the
     * arguments of a launch. */
    held_operator(c10::OperatorHandle op, const std::vector<c10::IValue> &arguments, const is_of_device &is);

    /* After each run, copy the tensor at `from` into the present memory of `into`. */
    void fill(value_place from, const at::Tensor &into);
    /* Wrap each run: `with` must call its argument. */
    void surround(std::function<void(const std::function<void()> &run)> with);

    void run() const;

    /* Call `body` with each tensor of values[begin:end] and its place. */
    static void for_each_place(const std::vector<c10::IValue> &values, size_t begin, size_t end,
                               bool are_results,
                               const std::function<void(const at::Tensor &, value_place)> &body);

  private:
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;
    std::vector<std::pair<value_place, at::Tensor>> fills;
    std::function<void(const std::function<void()> &run)> surroundings = [](const auto &run) { run(); };
};

/* Copies of bytes from before a run that is undone. */
class saved_memory {
  public:
    void save(const at::Tensor &tensor);
    void restore();

  private:
    struct bytes {
        void *at;
        std::vector<char> were;
    };
    std::vector<bytes> saved;
};

} // namespace simulated_gpu
