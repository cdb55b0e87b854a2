// One step of the cells of a recurrent layer, vector by vector.
#include "kernels/matrix/recurrent.h"

#include "kernels/vector/functions.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

Vec sigmoid(const Vec& x) { return times_sigmoid(Vec(1.f), x); }

// The new h of `count` lanes. x(gate) and p(gate) are their two sums. Writes c.
template <Cell cell, typename X, typename P>
inline Vec stepped(const X& x, const P& p, const Vec& h, float* c, std::int64_t count) {
  const auto sum = [&](std::int64_t gate) { return x(gate) + p(gate); };
  if constexpr (cell == Cell::kLstm) {
    const Vec kept = sigmoid(sum(1)) * load(c, count),
              now = at::vec::fmadd(sigmoid(sum(0)), CPU_CAPABILITY::tanh(sum(2)), kept);
    store(now, c, count);
    return sigmoid(sum(3)) * CPU_CAPABILITY::tanh(now);
  } else if constexpr (cell == Cell::kGru) {
    const Vec z = sigmoid(sum(1)),
              n = CPU_CAPABILITY::tanh(at::vec::fmadd(sigmoid(sum(0)), p(2), x(2)));
    return at::vec::fmadd(z, h - n, n);
  } else if constexpr (cell == Cell::kTanh) {
    return CPU_CAPABILITY::tanh(sum(0));
  } else {
    return at::vec::maximum(sum(0), Vec(0.f));  // keeps NaN
  }
}

template <Cell cell>
void run(const RecurrentCells& cells) {
  const RecurrentCells all = cells;  // a copy, whose fields stay in registers
  for (std::int64_t row = 0; row < all.rows; ++row) {
    const float *gates = all.gates + row * all.gates_stride,
                *products = all.products + row * all.products_stride;
    float *h = all.h + row * all.hidden, *c = all.c ? all.c + row * all.hidden : nullptr,
          *dst = all.dst + row * all.dst_stride;
    for_lanes(all.hidden, [&](std::int64_t lane, std::int64_t count) {
      const auto of = [&](const float* sums) {
        return [=](std::int64_t gate) { return load(sums + gate * all.hidden + lane, count); };
      };
      const Vec next =
          stepped<cell>(of(gates), of(products), load(h + lane, count), c ? c + lane : c, count);
      store(next, h + lane, count);
      store(next, dst + lane, count);
    });
  }
}

}  // namespace

void step_cells(const RecurrentCells& cells) {
  switch (cells.cell) {
    case Cell::kLstm:
      return run<Cell::kLstm>(cells);
    case Cell::kGru:
      return run<Cell::kGru>(cells);
    case Cell::kTanh:
      return run<Cell::kTanh>(cells);
    case Cell::kRelu:
      return run<Cell::kRelu>(cells);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
