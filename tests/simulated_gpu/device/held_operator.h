/* An operator of the CPU on the device's memory, kept to be run later, once or again and again. */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

#include "cpu_tensors.h"

namespace simulated_gpu {

/* A tensor among the values of an operator. */
struct value_place {
    bool is_result;
    size_t value, element;
};

class held_operator {
  public:
    using is_of_device = std::function<bool(const at::Tensor &)>;

    /* `arguments` are what the CPU's kernel gets. Those that are not of the device are copied, as a launch
     * does. */
    held_operator(c10::OperatorHandle op, const std::vector<c10::IValue> &arguments, const is_of_device &is);

    /* After a run, the tensor goes where `into` lies now. */
    void fill(value_place from, const at::Tensor &into);
    /* What is done around each run: it calls its argument. */
    void surround(std::function<void(const std::function<void()> &run)> with);

    void run() const;

    /* A place is of the tensor that the place itself is asked for: by each tensor's address. */
    static void for_each_place(const std::vector<c10::IValue> &values, size_t begin, size_t end,
                               bool are_results,
                               const std::function<void(const at::Tensor &, value_place)> &body);

  private:
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;
    std::vector<std::pair<value_place, at::Tensor>> fills;
    std::function<void(const std::function<void()> &run)> surroundings = [](const auto &run) { run(); };
};

/* What is there before work runs that is not to have run. */
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
