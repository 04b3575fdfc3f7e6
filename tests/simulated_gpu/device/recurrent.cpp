/* Cells of recurrent modules. torch has one kernel for each on a GPU, and several operators on the CPU. */
#include <ATen/ATen.h>
#include <torch/library.h>

namespace simulated_gpu {

using at::Tensor;
using maybe_tensor = std::optional<Tensor>;

static Tensor with_bias(const Tensor &gates, const maybe_tensor &bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

static Tensor or_zeros(const maybe_tensor &grad, const Tensor &like) {
    return grad && grad->defined() ? *grad : at::zeros_like(like);
}

static Tensor sum_over_batch(const Tensor &grad, bool wanted) {
    return wanted ? grad.sum(0) : Tensor();
}

static Tensor through_sigmoid(const Tensor &grad, const Tensor &output) {
    return grad * output * (1 - output);
}

static Tensor through_tanh(const Tensor &grad, const Tensor &output) {
    return grad * (1 - output * output);
}

/* ---- LSTM: gates are input, forget, cell, output ---- */

static std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor &input_gates, const Tensor &hidden_gates,
                                                    const Tensor &cx, const maybe_tensor &input_bias,
                                                    const maybe_tensor &hidden_bias) {
    auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
    Tensor input = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
           output = gates[3].sigmoid();
    Tensor cy = forget * cx + input * cell;
    return {output * cy.tanh(), cy, at::cat({input, forget, cell, output}, 1)};
}

static std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const maybe_tensor &grad_hy,
                                                             const maybe_tensor &grad_cy, const Tensor &cx,
                                                             const Tensor &cy, const Tensor &workspace,
                                                             bool has_bias) {
    auto gates = workspace.chunk(4, 1);
    const Tensor &input = gates[0], &forget = gates[1], &cell = gates[2], &output = gates[3];
    Tensor grad_output = or_zeros(grad_hy, cy), squashed = cy.tanh();
    Tensor grad_cell = or_zeros(grad_cy, cy) + through_tanh(grad_output * output, squashed);
    Tensor grad_gates =
        at::cat({through_sigmoid(grad_cell * cell, input), through_sigmoid(grad_cell * cx, forget),
                 through_tanh(grad_cell * input, cell), through_sigmoid(grad_output * squashed, output)},
                1);
    return {grad_gates, grad_cell * forget, sum_over_batch(grad_gates, has_bias)};
}

/* ---- GRU: gates are reset, update, new ---- */

static std::tuple<Tensor, Tensor> gru_cell(const Tensor &input_gates, const Tensor &hidden_gates,
                                           const Tensor &hx, const maybe_tensor &input_bias,
                                           const maybe_tensor &hidden_bias) {
    auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
    auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
    Tensor fresh = (of_input[2] + reset * of_hidden[2]).tanh();
    return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, of_hidden[2]}, 1)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
gru_cell_backward(const Tensor &grad_hy, const Tensor &workspace, bool has_bias) {
    auto kept = workspace.chunk(5, 1);
    const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
    Tensor grad_fresh = through_tanh(grad_hy * (1 - update), fresh);
    Tensor grad_update = through_sigmoid(grad_hy * (hx - fresh), update);
    Tensor grad_reset = through_sigmoid(grad_fresh * hidden, reset);
    Tensor of_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
    Tensor of_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
    return {of_input, of_hidden, grad_hy * update, sum_over_batch(of_input, has_bias),
            sum_over_batch(of_hidden, has_bias)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
    library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
    library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

} // namespace simulated_gpu
