// Arguments of the kernel of a recurrent layer other than matrix products.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// The kinds of cell and their number of gates.
enum class Cell : std::uint8_t { kLstm, kGru, kTanh, kRelu };
constexpr std::int64_t gates_of(Cell cell) {
  return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1;
}

// One step of some rows, each from a different sequence. With x = gates and p = products, both of
// [rows, gates, hidden], and s the sigmoid:
//   LSTM (i, f, g, o): c = s(x_f + p_f) c + s(x_i + p_i) tanh(x_g + p_g), h = s(x_o + p_o) tanh(c)
//   GRU (r, z, n):     h = (1 - z) tanh(x_n + s(x_r + p_r) p_n) + z h with z = s(x_z + p_z)
//   tanh and ReLU:     h = f(x + p)
// Source: the formulas of torch.nn.LSTM, GRU and RNN.
struct RecurrentCells {
  Cell cell;
  const float *gates, *products;
  std::int64_t gates_stride, products_stride;  // from row to row
  float *h, *c;                                // [rows, hidden]; c of an LSTM only
  float* dst;                                  // a copy of h, `dst_stride` from row to row
  std::int64_t dst_stride;
  std::int64_t rows, hidden;
};

}  // namespace torch_blocked::kernels
