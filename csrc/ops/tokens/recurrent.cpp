// Runs the steps of a recurrent layer: a product of the state with weight_hh, then the cell.
#include "ops/tokens/recurrent.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/linear/byte_blocks.h"
#include "ops/products/row_product.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::LinearRows;

// Multiplies a direction's weights by h of some sequences: with a kernel of linear layers of few
// rows, which is bound by memory and so reads bytes as they are, or with tiles of rows.
class StateProduct {
 public:
  explicit StateProduct(const RecurrentProblem& p)
      : columns_{&kernels::kernels(), p.hidden, kernels::gates_of(p.cell) * p.hidden},
        is_of_few_rows_(p.batch <= LinearRows::kMostRows),
        is_of_bytes_(is_of_few_rows_ && p.has_bytes) {
    const std::int64_t width = kernels::kernels().width;
    block_ = std::min(LinearRows::kMostVectors, ceil_div(columns_.columns, width)) * width;
  }

  // The distance between rows of the products.
  std::int64_t stride() const { return is_of_few_rows_ ? columns_.columns : columns_.width(); }
  // The parts of the products that threads can make separately; one if there are enough rows to
  // share.
  std::int64_t parts() const { return is_of_few_rows_ ? ceil_div(columns_.columns, block_) : 1; }
  std::int64_t part_elements() const { return columns_.lanes * columns_.columns / parts(); }
  // The packed weights, followed by the bias.
  std::int64_t floats() const { return bias_at() + padded_columns(); }
  std::string name() const {
    if (is_of_bytes_) return text("rows of bytes/", block_);
    return is_of_few_rows_ ? text("rows/", block_) : text("tiles/", columns_.group());
  }

  at::Tensor pack(const RecurrentWeights& weights) const {
    const at::Tensor packed = at::zeros({floats()}, at::kFloat);
    if (is_of_bytes_) {
      bytes().pack(weights.weight, weights.scales, packed.mutable_data_ptr());
    } else if (is_of_few_rows_) {
      at::Tensor padded = at::zeros({padded_columns(), columns_.lanes}, at::kFloat);
      padded.narrow(0, 0, columns_.columns).copy_(weights.numbers());
      packed.narrow(0, 0, bias_at())
          .copy_(padded.view({-1, block_, columns_.lanes}).transpose(1, 2).flatten());
    } else {
      const at::Tensor weight = weights.numbers();
      columns_.pack(matrix_of(weight, 0).transposed(), packed.mutable_data_ptr<float>());
    }
    if (weights.bias.defined()) {
      packed.narrow(0, bias_at(), columns_.columns).copy_(weights.bias);
    }
    return packed;
  }

  // Makes parts [begin, end) of products [rows, columns], rows stride() floats apart.
  void operator()(const float* packed, const float* h, std::int64_t rows, float* products,
                  std::int64_t begin, std::int64_t end) const {
    const float* bias = packed + bias_at();
    if (!is_of_few_rows_) {
      return multiply_all(columns_, {.src = h,
                                     .src_stride = columns_.lanes,
                                     .rows = rows,
                                     .packed = packed,
                                     .first = 0,
                                     .bias = bias,
                                     .dst = products,
                                     .dst_stride = stride()});
    }
    LinearRows few{.src = h,
                   .weights = packed,
                   .bias = bias,
                   .scales = nullptr,
                   .dst = products,
                   .rows = rows,
                   .inputs = columns_.lanes,
                   .outputs = columns_.columns,
                   .block = block_,
                   .weights_stride = columns_.lanes * block_,
                   .activation = {}};
    if (is_of_bytes_) bytes().give(few, packed);
    const auto run =
        is_of_bytes_ ? kernels::kernels().linear_byte_rows : kernels::kernels().linear_rows;
    run(few, begin, end);
  }

 private:
  ByteBlocks bytes() const { return {columns_.lanes, columns_.columns, block_}; }
  std::int64_t padded_columns() const {
    return is_of_few_rows_ ? ceil_div(columns_.columns, block_) * block_ : columns_.width();
  }
  std::int64_t bias_at() const {
    if (is_of_bytes_) return bytes().all_bytes() / static_cast<std::int64_t>(sizeof(float));
    return columns_.lanes * padded_columns();
  }

  PackedColumns columns_;
  bool is_of_few_rows_, is_of_bytes_;
  std::int64_t block_;  // columns of a part, with few rows
};

// Sequences of one direction, [first, first + rows) of its batch.
struct Sequences {
  std::int64_t direction, first, rows;
};

// Threads take different sequences, which need not wait for each other. If there are too few
// sequences, threads share the columns of each step's products.
class Steps {
 public:
  explicit Steps(const RecurrentProblem& p) : p_(p), product_(p) {
    const std::int64_t rows = p.directions * p.batch;
    h_.resize(static_cast<std::size_t>(rows * p.hidden));
    if (p.cell == Cell::kLstm) c_.resize(h_.size());
    products_.resize(static_cast<std::size_t>(rows * product_.stride()));
  }

  void operator()(const RecurrentBuffers& b) {
    copy(b.h, b.c, h_.data(), c_.data());
    if (p_.directions * p_.batch < threads()) {
      step_together(b);
    } else {
      step_apart(b);
    }
    copy(h_.data(), c_.data(), b.last_h, b.last_c);
  }

 private:
  void copy(const float* h, const float* c, float* to_h, float* to_c) const {
    parallel_units(std::ssize(h_), 1, [&](std::int64_t begin, std::int64_t end) {
      std::copy(h + begin, h + end, to_h + begin);
      if (!c_.empty()) std::copy(c + begin, c + end, to_c + begin);
    });
  }

  void step_apart(const RecurrentBuffers& b) {
    const std::int64_t blocks = std::min(p_.batch, ceil_div(threads(), p_.directions)),
                       rows = ceil_div(p_.batch, blocks);
    const std::int64_t work = p_.steps * rows * product_.parts() * product_.part_elements();
    parallel_units(p_.directions * blocks, work, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = std::min(p_.batch, i % blocks * rows);
        const Sequences own{i / blocks, first, std::min(rows, p_.batch - first)};
        for (std::int64_t step = 0; step < p_.steps && own.rows > 0; ++step) {
          multiply(b, own, 0, product_.parts());
          make_states(b, own, step);
        }
      }
    });
  }

  void step_together(const RecurrentBuffers& b) {
    const std::int64_t parts = product_.parts();
    const auto all_of = [&](std::int64_t direction) { return Sequences{direction, 0, p_.batch}; };
    for (std::int64_t step = 0; step < p_.steps; ++step) {
      parallel_units(p_.directions * parts, product_.part_elements(),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) {
                         multiply(b, all_of(i / parts), i % parts, i % parts + 1);
                       }
                     });
      parallel_units(p_.directions, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) make_states(b, all_of(i), step);
      });
    }
  }

  std::int64_t row_of(const Sequences& s) const { return s.direction * p_.batch + s.first; }

  void multiply(const RecurrentBuffers& b, const Sequences& s, std::int64_t begin,
                std::int64_t end) {
    product_(b.weights + s.direction * product_.floats(), h_.data() + row_of(s) * p_.hidden, s.rows,
             products_.data() + row_of(s) * product_.stride(), begin, end);
  }

  void make_states(const RecurrentBuffers& b, const Sequences& s, std::int64_t step) {
    const std::int64_t at = s.direction == 0 ? step : p_.steps - 1 - step;
    const std::int64_t token = p_.batch_first ? s.first * p_.steps + at : at * p_.batch + s.first;
    const std::int64_t next = p_.batch_first ? p_.steps : 1;  // tokens between sequences
    const std::int64_t gates = kernels::gates_of(p_.cell) * p_.hidden, of_token = p_.directions;
    kernels::kernels().step_cells({.cell = p_.cell,
                                   .gates = b.gates + (token * of_token + s.direction) * gates,
                                   .products = products_.data() + row_of(s) * product_.stride(),
                                   .gates_stride = next * of_token * gates,
                                   .products_stride = product_.stride(),
                                   .h = h_.data() + row_of(s) * p_.hidden,
                                   .c = c_.empty() ? nullptr : c_.data() + row_of(s) * p_.hidden,
                                   .dst = b.dst + (token * of_token + s.direction) * p_.hidden,
                                   .dst_stride = next * of_token * p_.hidden,
                                   .rows = s.rows,
                                   .hidden = p_.hidden});
  }

  RecurrentProblem p_;
  StateProduct product_;
  std::vector<float> h_, c_, products_;
};

}  // namespace

at::Tensor RecurrentWeights::numbers() const {
  if (!scales.defined()) return weight;
  return at::mul(weight.to(at::kFloat), scales.view({-1, 1}));
}

RecurrentPlan plan_recurrent(const RecurrentProblem& problem) {
  const StateProduct product(problem);
  return {.weights_format = text("recurrent/", product.name(), "/", problem.hidden),
          .pack =
              [product](const std::vector<RecurrentWeights>& of_directions) {
                std::vector<at::Tensor> packed;
                for (const auto& each : of_directions) packed.push_back(product.pack(each));
                return at::cat(packed);
              },
          .run = Steps(problem)};
}

}  // namespace torch_blocked
