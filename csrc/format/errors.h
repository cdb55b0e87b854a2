// Error types and the one place that builds error sentences.
//
// Every message has the same form:
//   torch_blocked::<op>: expected <rule>, got <value>; <what to do>
// csrc/python/errors.cpp maps the types below onto the Python exceptions of the same name.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace torch_blocked {

// A value of the right kind that breaks a rule.
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A value of the wrong kind (data type, rank, format where the op takes another family).
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Legal, but not supported by this library or by oneDNN (tag, data type, ISA).
struct NotImplementedError : std::logic_error {
  using std::logic_error::logic_error;
};

// oneDNN itself failed. Python sees RuntimeError.
struct OneDnnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

inline void write_value(std::ostream& out, bool value) { out << (value ? "true" : "false"); }

template <typename T>
void write_value(std::ostream& out, const T& value) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    out << std::string_view(value);
  } else if constexpr (requires { value.begin(), value.end(); }) {
    // Any range (std::vector, IntArrayRef, ...) prints as [a, b, c].
    const char* separator = "[";
    for (const auto& item : value) {
      out << separator;
      write_value(out, item);
      separator = ", ";
    }
    out << (value.begin() == value.end() ? "[]" : "]");
  } else if constexpr (std::is_same_v<T, std::int8_t> || std::is_same_v<T, std::uint8_t>) {
    out << static_cast<int>(value);
  } else {
    out << value;
  }
}

}  // namespace detail

// Joins its arguments into one string; ranges print as [a, b, c]. Use it for the <rule>, <value>
// and <what to do> parts: fail_value("pad", text("at most ", 3, " dims"), text(dims), "...").
template <typename... Args>
std::string text(const Args&... args) {
  std::ostringstream out;
  (detail::write_value(out, args), ...);
  return out.str();
}

// A user's value may be a megabyte long. The sentence shows its beginning, cut between two UTF-8
// characters.
inline std::string shortened(std::string_view value) {
  constexpr std::size_t kMost = 400, kShown = 120;
  if (value.size() <= kMost) return std::string(value);
  std::size_t end = kShown;
  while (end > 0 && (static_cast<unsigned char>(value[end]) & 0xc0) == 0x80) --end;
  return text(value.substr(0, end), "... (", value.size(), " bytes)");
}

// The sentence itself. `remedy` may be empty.
inline std::string error_sentence(std::string_view op, std::string_view expected,
                                  std::string_view got, std::string_view remedy) {
  std::string sentence =
      text("torch_blocked::", op, ": expected ", shortened(expected), ", got ", shortened(got));
  if (!remedy.empty()) sentence += text("; ", shortened(remedy));
  return sentence;
}

template <typename Error>
[[noreturn]] void fail(std::string_view op, std::string_view expected, std::string_view got,
                       std::string_view remedy) {
  throw Error(error_sentence(op, expected, got, remedy));
}

[[noreturn]] inline void fail_value(std::string_view op, std::string_view expected,
                                    std::string_view got, std::string_view remedy = {}) {
  fail<ValueError>(op, expected, got, remedy);
}

[[noreturn]] inline void fail_type(std::string_view op, std::string_view expected,
                                   std::string_view got, std::string_view remedy = {}) {
  fail<TypeError>(op, expected, got, remedy);
}

[[noreturn]] inline void fail_not_implemented(std::string_view op, std::string_view expected,
                                              std::string_view got, std::string_view remedy = {}) {
  fail<NotImplementedError>(op, expected, got, remedy);
}

// oneDNN returned an error: `what` is its message, `descriptors` the memory descriptors involved.
[[noreturn]] inline void fail_onednn(std::string_view op, std::string_view what,
                                     std::string_view descriptors) {
  throw OneDnnError(text("torch_blocked::", op, ": expected oneDNN to succeed, got \"", what,
                         "\" for ", descriptors,
                         "; set ONEDNN_VERBOSE=all in the environment to see why"));
}

}  // namespace torch_blocked
