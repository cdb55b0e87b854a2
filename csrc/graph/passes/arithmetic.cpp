// Translates pointwise ops of ATen into instructions: a table of ops, and a computation that folds
// numbers into neighbouring instructions and assigns strips.
#include "graph/passes/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace torch_blocked::graph {
namespace {

using Op = kernels::Arithmetic;
using kernels::Instruction;
using kernels::Program;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Thrown for an argument for which arithmetic is not known.
struct NotKnown {};

// ---- the ops ------------------------------------------------------------------------------------

// A node's arguments as terms.
class Call {
 public:
  Call(const Graph& graph, const Node& node, const std::map<Value, Term>& terms,
       Computation& computation)
      : graph_(graph), node_(node), terms_(terms), to(computation) {}

  Term term(std::size_t i) const {
    if (i >= node_.arguments.size()) throw NotKnown();
    const Argument& argument = node_.arguments[i];
    if (is_real(argument)) return Term::number(argument.constant().toScalar().toDouble());
    const auto found = terms_.find(argument.value());
    if (found == terms_.end()) throw NotKnown();
    return found->second;
  }
  double number(std::size_t i, double missing) const {
    if (i >= node_.arguments.size() || is_none(node_.arguments[i])) return missing;
    const Term given = term(i);
    if (!given.is_number()) throw NotKnown();
    return given.shift;
  }
  std::string_view word(std::size_t i) const {
    const Argument& argument = node_.arguments.at(i);
    return argument.is_constant() && argument.constant().isString()
               ? argument.constant().toStringView()
               : std::string_view();
  }

 private:
  const Graph& graph_;
  const Node& node_;
  const std::map<Value, Term>& terms_;

 public:
  Computation& to;
};

template <Op op>
Term unary(const Call& call) {
  return call.to.apply(op, call.term(0));
}

template <Op op>
Term binary(const Call& call) {
  return call.to.apply(op, call.term(0), call.term(1));
}

// x + alpha * y, and x - alpha * y.
template <int sign>
Term sum(const Call& call) {
  const Term y = call.to.multiply(call.term(1), Term::number(sign * call.number(2, 1)));
  return call.to.add(call.term(0), y);
}

Term reversed_difference(const Call& call) {  // y - alpha * x
  const Term x = call.to.multiply(call.term(0), Term::number(-call.number(2, 1)));
  return call.to.add(call.term(1), x);
}

Term product(const Call& call) { return call.to.multiply(call.term(0), call.term(1)); }
Term quotient(const Call& call) { return call.to.divide(call.term(0), call.term(1)); }
Term negative(const Call& call) { return call.to.multiply(call.term(0), Term::number(-1)); }
Term square(const Call& call) { return call.to.multiply(call.term(0), call.term(0)); }

// x^n for whole n > 0, by squares.
Term whole_power(Computation& to, const Term& x, std::int64_t n) {
  if (n == 1) return x;
  const Term half = whole_power(to, x, n / 2), square = to.multiply(half, half);
  return n % 2 == 0 ? square : to.multiply(square, x);
}

Term power(const Call& call) {
  const Term x = call.term(0), exponent = call.term(1);
  if (!exponent.is_number()) return call.to.apply(Op::power_of, x, exponent);
  const double n = exponent.shift;
  constexpr double kMostFactors = 8;
  if (n >= 1 && n <= kMostFactors && 2 * n == std::floor(2 * n)) {
    const Term whole = whole_power(call.to, x, static_cast<std::int64_t>(n));
    return n == std::floor(n) ? whole : call.to.multiply(whole, call.to.apply(Op::sqrt, x));
  }
  if (n == 0.5) return call.to.apply(Op::sqrt, x);
  if (n == -0.5) return call.to.apply(Op::rsqrt, x);
  if (n == -1) return call.to.apply(Op::reciprocal, x);
  return call.to.apply(Op::power, x, n);
}

template <int least_at, int greatest_at>
Term clamped(const Call& call) {
  const double least = least_at < 0 ? -kInfinity : call.number(least_at, -kInfinity);
  const double greatest = greatest_at < 0 ? kInfinity : call.number(greatest_at, kInfinity);
  return call.to.clamp(call.term(0), least, greatest);
}

Term relu(const Call& call) { return call.to.clamp(call.term(0), 0, kInfinity); }
Term relu6(const Call& call) { return call.to.clamp(call.term(0), 0, 6); }
Term hardtanh(const Call& call) {
  return call.to.clamp(call.term(0), call.number(1, -1), call.number(2, 1));
}

Term hardsigmoid(const Call& call) {  // clamp(x / 6 + 1 / 2, 0, 1)
  const Term x = call.to.multiply(call.term(0), Term::number(1. / 6));
  return call.to.clamp(call.to.add(x, Term::number(0.5)), 0, 1);
}

Term leaky_relu(const Call& call) {
  return call.to.apply(Op::leaky_relu, call.term(0), call.number(1, 0.01));
}

Term gelu(const Call& call) {
  const Term x = call.term(0), half = Term::number(0.5), one = Term::number(1);
  Computation& to = call.to;
  if (call.word(1) != "tanh") {  // x / 2 (1 + erf(x / sqrt(2)))
    const Term erf = to.apply(Op::erf, to.multiply(x, Term::number(std::sqrt(0.5))));
    return to.multiply(to.multiply(x, half), to.add(erf, one));
  }
  const Term cube = to.multiply(to.multiply(x, x), x);  // x sigmoid(2 sqrt(2 / pi) (x + ...))
  const Term inner = to.add(x, to.multiply(cube, Term::number(0.044715)));
  const double scale = 2 * std::sqrt(2 / std::acos(-1.));
  return to.multiply(x, to.apply(Op::sigmoid, to.multiply(inner, Term::number(scale))));
}

Term softplus(const Call& call) {
  if (call.number(2, 20) != 20) throw NotKnown();
  const double beta = call.number(1, 1);
  const Term scaled = call.to.multiply(call.term(0), Term::number(beta));
  return call.to.divide(call.to.apply(Op::softplus, scaled), Term::number(beta));
}

Term log_sigmoid(const Call& call) {  // -log(1 + e^-x)
  const Term x = call.to.multiply(call.term(0), Term::number(-1));
  return call.to.multiply(call.to.apply(Op::softplus, x), Term::number(-1));
}

// scale * (x > 0 ? x : alpha * (e^(input_scale x) - 1)), where input_scale keeps the sign of x
Term elu_of(Computation& to, const Term& x, double alpha, double scale, double input_scale) {
  if (!(input_scale > 0) || !std::isfinite(input_scale)) throw NotKnown();
  const Term scaled = to.multiply(x, Term::number(input_scale));
  return to.apply(Op::elu, scaled, scale / input_scale, alpha * scale);
}

Term elu(const Call& call) {
  return elu_of(call.to, call.term(0), call.number(1, 1), call.number(2, 1), call.number(3, 1));
}

Term celu(const Call& call) {
  const double alpha = call.number(1, 1);
  return elu_of(call.to, call.term(0), alpha, 1, 1 / alpha);
}

Term selu(const Call& call) {  // the constants of torch.nn.SELU
  return elu_of(call.to, call.term(0), 1.6732632423543772, 1.0507009873554805, 1);
}

Term softsign(const Call& call) {  // x / (1 + |x|)
  const Term x = call.term(0);
  return call.to.divide(x, call.to.add(call.to.apply(Op::abs, x), Term::number(1)));
}

Term hardshrink(const Call& call) {  // |x| <= lambda ? 0 : x
  const Term x = call.term(0), size = call.to.apply(Op::abs, x);
  const Term is_small = call.to.apply(Op::less_equal, size, Term::number(call.number(1, 0.5)));
  return call.to.apply(Op::select, is_small, Term::number(0), x);
}

Term softshrink(const Call& call) {  // x - clamp(x, -lambda, lambda)
  const double lambda = call.number(1, 0.5);
  const Term inside = call.to.clamp(call.term(0), -lambda, lambda);
  return call.to.add(call.term(0), call.to.multiply(inside, Term::number(-1)));
}

Term threshold(const Call& call) {
  const Term x = call.term(0);
  return call.to.apply(Op::select, call.to.apply(Op::less_equal, x, call.term(1)), call.term(2), x);
}

Term prelu(const Call& call) { return call.to.apply(Op::prelu, call.term(0), call.term(1)); }

Term where(const Call& call) {
  return call.to.apply(Op::select, call.term(0), call.term(1), call.term(2));
}

Term masked_fill(const Call& call) {
  return call.to.apply(Op::select, call.term(1), call.term(2), call.term(0));
}

Term addcmul(const Call& call) {  // x + value y z
  const Term yz = call.to.multiply(call.term(1), call.term(2));
  return call.to.add(call.term(0), call.to.multiply(yz, Term::number(call.number(3, 1))));
}

Term addcdiv(const Call& call) {  // x + value y / z
  const Term yz = call.to.divide(call.term(1), call.term(2));
  return call.to.add(call.term(0), call.to.multiply(yz, Term::number(call.number(3, 1))));
}

// x + weight (y - x), or y - (1 - weight) (y - x): exact at both ends, as at::lerp.
Term lerp(const Call& call) {
  const double weight = call.number(2, 0);
  const Term x = call.term(0), y = call.term(1);
  const Term way = call.to.add(y, call.to.multiply(x, Term::number(-1)));
  return weight < 0.5 ? call.to.add(x, call.to.multiply(way, Term::number(weight)))
                      : call.to.add(y, call.to.multiply(way, Term::number(weight - 1)));
}

template <int value>
Term filled(const Call&) {
  return Term::number(value);
}

struct Row {
  std::string_view name, overload;
  Term (*lower)(const Call& call);
  bool is_comparison = false;  // its result is of type bool
};

// Ops by name and overload, without "aten::".
constexpr auto kRows = std::to_array<Row>({
    {"add", "Tensor", sum<1>},
    {"add", "Scalar", sum<1>},
    {"sub", "Tensor", sum<-1>},
    {"sub", "Scalar", sum<-1>},
    {"rsub", "Tensor", reversed_difference},
    {"rsub", "Scalar", reversed_difference},
    {"mul", "Tensor", product},
    {"mul", "Scalar", product},
    {"div", "Tensor", quotient},
    {"div", "Scalar", quotient},
    {"neg", "", negative},
    {"square", "", square},
    {"reciprocal", "", unary<Op::reciprocal>},
    {"pow", "Tensor_Scalar", power},
    {"pow", "Tensor_Tensor", power},
    {"addcmul", "", addcmul},
    {"addcdiv", "", addcdiv},
    {"lerp", "Scalar", lerp},
    {"maximum", "", binary<Op::maximum>},
    {"minimum", "", binary<Op::minimum>},
    {"max", "other", binary<Op::maximum>},
    {"min", "other", binary<Op::minimum>},
    {"clamp", "", clamped<1, 2>},
    {"clip", "", clamped<1, 2>},
    {"clamp_min", "", clamped<1, -1>},
    {"clamp_max", "", clamped<-1, 1>},
    {"relu", "", relu},
    {"relu6", "", relu6},
    {"hardtanh", "", hardtanh},
    {"hardsigmoid", "", hardsigmoid},
    {"hardswish", "", unary<Op::hardswish>},
    {"leaky_relu", "", leaky_relu},
    {"prelu", "", prelu},
    {"_prelu_kernel", "", prelu},
    {"elu", "", elu},
    {"celu", "", celu},
    {"selu", "", selu},
    {"gelu", "", gelu},
    {"silu", "", unary<Op::silu>},
    {"mish", "", unary<Op::mish>},
    {"softplus", "", softplus},
    {"softsign", "", softsign},
    {"log_sigmoid", "", log_sigmoid},
    {"hardshrink", "", hardshrink},
    {"softshrink", "", softshrink},
    {"threshold", "", threshold},
    {"sigmoid", "", unary<Op::sigmoid>},
    {"tanh", "", unary<Op::tanh>},
    {"abs", "", unary<Op::abs>},
    {"sqrt", "", unary<Op::sqrt>},
    {"rsqrt", "", unary<Op::rsqrt>},
    {"exp", "", unary<Op::exp>},
    {"exp2", "", unary<Op::exp2>},
    {"expm1", "", unary<Op::expm1>},
    {"log", "", unary<Op::log>},
    {"log2", "", unary<Op::log2>},
    {"log10", "", unary<Op::log10>},
    {"log1p", "", unary<Op::log1p>},
    {"sin", "", unary<Op::sin>},
    {"cos", "", unary<Op::cos>},
    {"tan", "", unary<Op::tan>},
    {"sinh", "", unary<Op::sinh>},
    {"cosh", "", unary<Op::cosh>},
    {"asin", "", unary<Op::asin>},
    {"acos", "", unary<Op::acos>},
    {"atan", "", unary<Op::atan>},
    {"atan2", "", binary<Op::atan2>},
    {"erf", "", unary<Op::erf>},
    {"erfc", "", unary<Op::erfc>},
    {"floor", "", unary<Op::floor>},
    {"ceil", "", unary<Op::ceil>},
    {"round", "", unary<Op::round>},
    {"trunc", "", unary<Op::trunc>},
    {"gt", "Scalar", binary<Op::greater>, true},
    {"gt", "Tensor", binary<Op::greater>, true},
    {"ge", "Scalar", binary<Op::greater_equal>, true},
    {"ge", "Tensor", binary<Op::greater_equal>, true},
    {"lt", "Scalar", binary<Op::less>, true},
    {"lt", "Tensor", binary<Op::less>, true},
    {"le", "Scalar", binary<Op::less_equal>, true},
    {"le", "Tensor", binary<Op::less_equal>, true},
    {"eq", "Scalar", binary<Op::equal>, true},
    {"eq", "Tensor", binary<Op::equal>, true},
    {"ne", "Scalar", binary<Op::not_equal>, true},
    {"ne", "Tensor", binary<Op::not_equal>, true},
    {"zeros_like", "", filled<0>},
    {"ones_like", "", filled<1>},
    {"where", "self", where},
    {"where", "ScalarOther", where},
    {"where", "ScalarSelf", where},
    {"masked_fill", "Scalar", masked_fill},
});

const Row* row_of(const Node& node) {
  constexpr std::string_view kAten = "aten::";
  if (!node.name.starts_with(kAten) || node.held.has_value()) return nullptr;
  const std::string_view name = std::string_view(node.name).substr(kAten.size());
  const auto found = std::ranges::find_if(
      kRows, [&](const Row& row) { return row.name == name && row.overload == node.overload; });
  return found == kRows.end() ? nullptr : &*found;
}

// The sum of two numbers. Raises NotKnown if it cancels most of them: (x + 2^23) - 2^23 rounds x.
double sum_of(double a, double b) {
  const double sum = a + b;
  const bool cancels = std::abs(sum) < 1e-3 * std::max(std::abs(a), std::abs(b));
  if (cancels && a != 0 && b != 0) throw NotKnown();
  return sum;
}

}  // namespace

// ---- a program in the making --------------------------------------------------------------------

Term Computation::emit(Instruction instruction) {
  instruction.dst = Program::kMostOperands + std::ssize(instructions_);
  instructions_.push_back(instruction);
  return {.place = instruction.dst};
}

// A place that holds the term's value.
std::int64_t Computation::place_of(const Term& term) {
  if (!term.is_number() && term.scale == 1 && term.shift == 0) return term.place;
  return apply(Op::copy, term).place;
}

Term Computation::apply(Op op, const Term& x, double alpha, double beta) {
  return emit({.op = op,
               .dst = 0,
               .x = x.place,
               .x_scale = x.scale,
               .x_shift = x.shift,
               .alpha = alpha,
               .beta = beta});
}

Term Computation::apply(Op op, const Term& x, const Term& y) {
  return emit({.op = op,
               .dst = 0,
               .x = x.place,
               .y = y.place,
               .x_scale = x.scale,
               .x_shift = x.shift,
               .y_scale = y.scale,
               .y_shift = y.shift});
}

Term Computation::apply(Op op, const Term& x, const Term& y, const Term& z) {
  const std::int64_t place = place_of(z);
  return emit({.op = op,
               .dst = 0,
               .x = x.place,
               .y = y.place,
               .z = place,
               .x_scale = x.scale,
               .x_shift = x.shift,
               .y_scale = y.scale,
               .y_shift = y.shift});
}

Term Computation::clamp(const Term& x, double least, double greatest) {
  if (!(least <= greatest)) throw NotKnown();
  return apply(Op::clamp, x, least, greatest);
}

Term Computation::add(const Term& x, const Term& y) {
  if (x.is_number() && !y.is_number()) return add(y, x);
  if (y.is_number()) return {x.place, x.scale, sum_of(x.shift, y.shift)};
  return apply(Op::add, x, y);
}

Term Computation::multiply(const Term& x, const Term& y) {
  if (x.is_number() && !y.is_number()) return multiply(y, x);
  if (!y.is_number()) return apply(Op::multiply, x, y);
  // A zero shift stays zero, even times infinity.
  return {x.place, x.scale * y.shift, x.shift == 0 ? x.shift : x.shift * y.shift};
}

Term Computation::divide(const Term& x, const Term& y) {
  if (y.is_number() && y.shift != 0) return multiply(x, Term::number(1 / y.shift));
  return apply(Op::divide, x, y);
}

namespace {

bool is_instruction(std::int64_t place) { return place >= Program::kMostOperands; }
std::size_t index_of(std::int64_t place) {
  return static_cast<std::size_t>(place - Program::kMostOperands);
}

template <typename F>
void for_reads(Instruction& instruction, F&& f) {
  const std::int64_t reads = kernels::arity(instruction.op);
  f(instruction.x);
  if (reads > 1) f(instruction.y);
  if (reads > 2) f(instruction.z);
}

// Makes an instruction compute scale * result + shift instead of result; false if it cannot.
bool absorb(Instruction& it, double scale, double shift) {
  switch (it.op) {
    case Op::copy:
      it.x_scale *= scale;
      it.x_shift = it.x_shift * scale + shift;
      return true;
    case Op::clamp:
      it.x_scale *= scale;
      it.x_shift = it.x_shift * scale + shift;
      it.alpha = it.alpha * scale + shift;
      it.beta = it.beta * scale + shift;
      if (scale < 0) std::swap(it.alpha, it.beta);
      return true;
    case Op::add:
      it.x_scale *= scale;
      it.y_scale *= scale;
      it.x_shift = it.x_shift * scale + shift;
      it.y_shift *= scale;
      return true;
    case Op::multiply:
    case Op::divide:
      if (shift != 0) return false;
      it.x_scale *= scale;
      it.x_shift *= scale;
      return true;
    default:
      return false;
  }
}

}  // namespace

std::optional<std::vector<Instruction>> Computation::compiled(const Term& result) const {
  Computation whole = *this;
  std::int64_t last = result.place;
  const bool as_it_is = is_instruction(last) && result.scale == 1 && result.shift == 0;
  if (!as_it_is) {
    const auto reads_last = [&](Instruction it) {
      bool found = false;
      for_reads(it, [&](std::int64_t place) { found |= place == last; });
      return found;
    };
    const bool alone = is_instruction(last) && std::isfinite(result.scale) &&
                       std::ranges::none_of(instructions_, reads_last);
    if (!alone || !absorb(whole.instructions_[index_of(last)], result.scale, result.shift)) {
      last = whole.apply(Op::copy, result).place;
    }
  }
  std::vector<Instruction>& all = whole.instructions_;
  std::vector<std::size_t> last_read(all.size());  // of each result, by the index of its reader
  std::vector<bool> needed(all.size());
  needed[index_of(last)] = true;
  for (std::size_t i = all.size(); i-- > 0;) {
    if (!needed[i]) continue;
    for_reads(all[i], [&](std::int64_t place) {
      if (!is_instruction(place)) return;
      needed[index_of(place)] = true;
      last_read[index_of(place)] = std::max(last_read[index_of(place)], i);
    });
  }
  std::vector<Instruction> program;
  std::vector<std::int64_t> strip(all.size());
  std::vector<std::size_t> free_from(Program::kMostStrips);  // the first that may write a strip
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!needed[i]) continue;
    Instruction it = all[i];
    for_reads(it, [&](std::int64_t& place) {
      if (is_instruction(place)) {
        place = strip[index_of(place)];
      } else if (place == Term::kNumber) {
        place = Program::kZeros;
      }
    });
    // An instruction may overwrite what it is the last to read.
    const auto free = std::ranges::find_if(free_from, [&](std::size_t from) { return from <= i; });
    if (free == free_from.end()) return std::nullopt;
    *free = last_read[i];
    it.dst = strip[i] = Program::kMostOperands + (free - free_from.begin());
    program.push_back(it);
    if (all[i].dst == last) break;
  }
  return program;
}

bool has_arithmetic(const Node& node) { return row_of(node) != nullptr; }

bool is_comparison(const Node& node) {
  const Row* row = row_of(node);
  return row && row->is_comparison;
}

std::optional<Term> lower(const Graph& graph, const Region& region, Computation& computation) {
  std::map<Value, Term> terms;
  for (std::size_t i = 0; i < region.operands.size(); ++i) {
    const Value value = region.operands[i];
    const auto constant = graph.constants.find(value);
    terms[value] = constant != graph.constants.end() && constant->second.numel() == 1
                       ? Term::number(constant->second.item<double>())
                       : Term{.place = static_cast<std::int64_t>(i)};
  }
  try {
    Term result;
    for (const Node* node : region.nodes) {
      result = terms[node->output()] = row_of(*node)->lower({graph, *node, terms, computation});
    }
    return result.is_number() ? std::nullopt : std::optional(result);
  } catch (const NotKnown&) {
    return std::nullopt;
  }
}

}  // namespace torch_blocked::graph
