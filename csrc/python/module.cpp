// The Python module torch_blocked._C. It binds the trace and the state of the runtime here, and
// calls the other files' bindings. Ops are not here: torch.ops.torch_blocked has them
// (ops/list.inc).
#include <omp.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/fma_peak.h"
#include "ops/blocked_forms.h"
#include "ops/implementations.h"
#include "runtime/bandwidth.h"
#include "runtime/content_hash.h"
#include "runtime/isa.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/packed_weights.h"
#include "runtime/own_file.h"
#include "runtime/trace/observer.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace py = pybind11;

namespace torch_blocked {

void bind_errors(py::module_& m);        // python/errors.cpp
void bind_wrapper(py::module_& m);       // python/wrapper.cpp
void bind_descriptor(py::module_& m);    // python/descriptor.cpp
void bind_graph(py::module_& m);         // python/graph.cpp
void bind_script(py::module_& m);        // python/script.cpp
void bind_direct_calls(py::module_& m);  // python/direct_calls.cpp
void bind_memory(py::module_& m);        // python/memory.cpp

namespace {

void bind_trace(py::module_& m) {
  py::enum_<trace::Kind>(m, "Kind")
      .value("reorder", trace::Kind::kReorder)
      .value("pack", trace::Kind::kPack)
      .value("fallback", trace::Kind::kFallback)
      .value("ref", trace::Kind::kRef)
      .value("module", trace::Kind::kModule)
      .value("operator", trace::Kind::kOp)
      .value("onednn", trace::Kind::kOneDnn);
  py::class_<trace::Event>(m, "Event")
      .def_readonly("kind", &trace::Event::kind)
      .def_readonly("op", &trace::Event::op)
      .def_readonly("detail", &trace::Event::detail)
      .def_readonly("bytes", &trace::Event::bytes)
      .def_readonly("time_ns", &trace::Event::time_ns)
      .def_readonly("module", &trace::Event::module)
      .def_readonly("is_backward", &trace::Event::is_backward)
      .def_readonly("line", &trace::Event::line)
      .def_readonly("start_ns", &trace::Event::start_ns)
      .def_readonly("id", &trace::Event::id)
      .def_readonly("parent", &trace::Event::parent)
      .def_readonly("thread", &trace::Event::thread)
      .def_readonly("src", &trace::Event::src)
      .def_readonly("dst", &trace::Event::dst)
      .def_readonly("implementation", &trace::Event::implementation)
      .def_readonly("flops", &trace::Event::flops)
      .def_readonly("recording_ns", &trace::Event::recording_ns);
  m.def("trace_start", &trace::start);
  m.def("trace_stop", &trace::stop);
  m.def("trace_totals", &trace::totals, "events since import: reorder, pack, fallback, ref");
  m.def("trace_fallback", [](std::string op, std::string why, std::string line) {
    trace::Event event{trace::Kind::kFallback, std::move(op), std::move(why)};
    event.line = std::move(line);
    trace::record(std::move(event));
  });
  m.def(
      "trace_enter",
      [](std::string name, std::string path, std::int64_t since) {
        if (!trace::recording()) return std::numeric_limits<std::size_t>::max();
        trace::Event event{trace::Kind::kModule, std::move(name), {}};
        event.module = std::move(path);
        return trace::open(std::move(event), since);
      },
      py::arg("name"), py::arg("path"), py::arg("since") = 0,
      "begins a module's forward in this thread; trace_leave takes what it returns. since: when\n"
      "time.perf_counter_ns() was what the work for that began");
  m.def("trace_leave", &trace::close, py::arg("place"), py::arg("at") = 0);
  m.def("trace_thread", &trace::this_thread, "as in events of this thread");
  m.def("is_recording", &trace::recording);
  m.def(
      "watch_reorders",
      [](py::object now) {
        thread_local py::object* watcher = nullptr;
        py::object before = watcher ? *watcher : py::none();
        delete watcher;
        watcher = now.is_none() ? nullptr : new py::object(now);
        trace::watch_reorders(
            watcher ? trace::OnReorder([now](const char* op, const std::string& formats) {
              const py::gil_scoped_acquire gil;
              now(op, formats);
            })
                    : trace::OnReorder());
        return before;
      },
      py::arg("watcher"),
      "From now on watcher(op, formats) is called before each reorder in this thread, and may\n"
      "raise; None: nobody. Returns the one before.");
  m.def("start_observing", &start_observing, py::arg("onednn"));
  m.def("stop_observing", &stop_observing, py::arg("onednn"));
}

py::dict onednn_version() {
  static const auto runtime_name = [](unsigned runtime) {
    switch (runtime) {
      case DNNL_RUNTIME_SEQ:
        return "sequential";
      case DNNL_RUNTIME_OMP:
        return "omp";
      case DNNL_RUNTIME_TBB:
        return "tbb";
      case DNNL_RUNTIME_THREADPOOL:
        return "threadpool";
      case DNNL_RUNTIME_SYCL:
        return "sycl";
      default:
        return "unknown";
    }
  };
  const dnnl_version_t* version = dnnl_version();
  py::dict result;
  result["version"] = std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
                      std::to_string(version->patch);
  result["hash"] = version->hash;
  result["cpu_runtime"] = runtime_name(version->cpu_runtime);
  return result;
}

// The number of threads that a parallel region of ours really ran on, and the number that oneDNN's
// OpenMP would use.
std::pair<std::size_t, int> threads_in_use() {
  std::mutex mutex;
  std::set<std::thread::id> ids;
  on_all_threads([&] {
    std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  return {ids.size(), omp_get_max_threads()};
}

// For tests: runs loops with these numbers of units on all threads together. The calling thread
// sleeps in its first piece of every loop. Returns how often each unit ran and, for each loop, how
// many units the calling thread ran. The loop numbered `fails` raises.
std::pair<std::vector<std::vector<int>>, std::vector<int>> walk_loops(
    const std::vector<std::int64_t>& loops, std::chrono::microseconds sleep, std::int64_t fails) {
  const auto caller = std::this_thread::get_id();
  std::vector<std::vector<std::atomic<int>>> runs;
  for (const std::int64_t units : loops) runs.emplace_back(static_cast<std::size_t>(units));
  std::vector<int> of_caller(loops.size());
  on_all_threads([&] {
    for (std::size_t i = 0; i < loops.size(); ++i) {
      bool slow = std::this_thread::get_id() == caller;
      parallel_units(loops[i], kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
        if (static_cast<std::int64_t>(i) == fails) throw std::runtime_error("walk_loops fails");
        if (std::exchange(slow, false)) std::this_thread::sleep_for(sleep);
        for (std::int64_t unit = begin; unit < end; ++unit)
          ++runs[i][static_cast<std::size_t>(unit)];
        if (std::this_thread::get_id() == caller) of_caller[i] += static_cast<int>(end - begin);
      });
    }
  });
  std::vector<std::vector<int>> counts;
  for (const auto& each : runs) counts.emplace_back(each.begin(), each.end());
  return {counts, of_caller};
}

std::map<std::string, std::vector<std::string>> implementations() {
  std::map<std::string, std::vector<std::string>> names;
  for (const Family* each : families()) {
    names[each->name()].assign(each->names().begin(), each->names().end());
  }
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  bind_errors(m);
  bind_descriptor(m);
  bind_graph(m);
  bind_script(m);
  bind_direct_calls(m);
  bind_memory(m);
  bind_trace(m);
  bind_wrapper(m);
  m.def(
      "isa", [] { return isa_name(isa()); },
      "instruction set in use: default, avx2, avx512 or amx");
  m.def("native_blocks", &native_blocks,
        "Channels in a block for which this CPU has fast kernels, the fastest first: [16, 8] with\n"
        "AVX-512, else [8]. A list of int, whose first one is to_blocked's default.");
  m.def("onednn_version", &onednn_version);
  m.attr("BUILD") = TORCH_BLOCKED_BUILD;
  m.attr("BUILT_WITH_ONEDNN") = py::make_tuple(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR);
  m.def("threads_in_use", &threads_in_use);
  m.def("walk_loops", &walk_loops, py::arg("loops"),
        py::arg("sleep") = std::chrono::microseconds(0), py::arg("fails") = -1,
        py::call_guard<py::gil_scoped_release>());
  m.def("packed_weight_bytes", &packed_weight_bytes);
  m.def(
      "clear_packed_weights", &clear_packed_weights,
      "Forgets the packed weights of all convolutions; each packs its own anew at its next use.\n\n"
      "Needed only after writing to weights through a raw address, or through a NumPy array made\n"
      "of the parameter itself, that was taken before their last use: every other write is seen.");
  m.def("idle_pool_bytes", &idle_pool_bytes);
  m.def("release_pool", &release_pool);
  m.def("return_idle_memory", &return_idle_memory);
  m.def("implementations", &implementations, "the names in every family's list");
  m.def(
      "force_implementation",
      [](const std::string& of, const std::string& name) { family(of).force(name); },
      py::arg("family"), py::arg("implementation"),
      "For tests and benchmarks: from now on the family's problems run by this implementation "
      "only,\n"
      "and raise NotImplementedError where it cannot; \"\" allows all of them again.");
  m.def(
      "last_implementation", [](const std::string& of) { return family(of).last(); },
      py::arg("family"), "what this thread's last problem of the family ran by, or \"none\"");
  m.def("register_blocked_form", &register_blocked_form, py::arg("op"), py::arg("blocked"),
        "As the function of the same name in the public headers.");
  m.def(
      "check_blocked_form", &check_blocked_form, py::arg("op"), py::arg("blocked"),
      "Raises ValueError for what register_blocked_form takes and would refuse at the first use.");
  m.def(
      "blocked_form",
      [](const std::string& name, const std::string& overload) -> std::optional<std::string> {
        const auto form = blocked_form({name, overload});
        return form ? std::optional(toString(*form)) : std::nullopt;
      },
      py::arg("name"), py::arg("overload"), "the op that another library registered, or None");
  m.def(
      "check_form_result",
      [](const std::string& op, const std::string& form, const std::optional<at::Tensor>& result,
         const std::vector<at::Tensor>& arguments, std::int64_t block,
         std::vector<c10::SymInt> dims, std::optional<at::ScalarType> dtype) {
        check_form_result(op, form, result.value_or(at::Tensor()), arguments,
                          {block, std::move(dims), dtype});
      },
      py::arg("op"), py::arg("form"), py::arg("result"), py::arg("arguments"), py::arg("block"),
      py::arg("dims"), py::arg("dtype"),
      "Raises RuntimeError, which names the form, for a result that is not what the op returns. No "
      "dims: what the op returns is not known.");
  m.def("check_form_tail", &check_form_tail, py::arg("op"), py::arg("form"), py::arg("result"),
        py::arg("channels"),
        "Raises RuntimeError, which names the form, for a tail that is not 0.");
  m.def(
      "content_hash", [](const at::Tensor& tensor) { return content_hash(tensor.contiguous()); },
      py::arg("tensor"), "of the values of a strided tensor, in the order of its dims",
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "read_own_file",
      [](const std::string& path) -> std::optional<py::bytes> {
        const auto content = read_own_file(path);
        return content ? std::optional(py::bytes(*content)) : std::nullopt;
      },
      py::arg("path"), "None for a file that others could write to, a link, a pipe or none");
  m.def("append_to_own_file", &append_to_own_file, py::arg("path"), py::arg("lines"),
        "False where that fails, or the file is not this user's alone");
  m.def("fingerprint", &fingerprint, "what measured times depend on, but for the CPU");
  m.def("fma_peak_gflops", &fma_peak_gflops, "float32 GFLOP/s of one core, by FMAs in registers");
  m.def("memory_bandwidth_gbs", &memory_bandwidth_gbs,
        "GB/s read and written by copies beyond the caches, by all threads",
        py::call_guard<py::gil_scoped_release>());
  isa();  // fixes the limits at import, and raises for a bad one
}

}  // namespace torch_blocked
