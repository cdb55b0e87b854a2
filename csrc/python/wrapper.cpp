// Makes the Python objects of blocked tensors without the interpreter. torch's own way
// (Tensor._make_wrapper_subclass, and two attributes) takes longer than a small op.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "format/errors.h"
#include "ops/blocked.h"
#include "ops/registered.h"

namespace py = pybind11;

namespace torch_blocked {
namespace {

// The error for C++ code that asks a wrapper for its data, as data_ptr<T>() and accessors do.
constexpr const char* kNoMemory =
    "torch_blocked::data_ptr: expected a dense tensor, got a blocked one, or a view of one, whose "
    "values do not lie in memory as its strides say; pass .to_dense() or, of a view, .clone()";

// From now on, asking `tensor` for its data raises an error instead of returning null or other
// values.
void deny_memory(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      kNoMemory);
}

// A tensor [N, C, *spatial] without data, for `physical` [N, ceil(C/b), *spatial, b].
at::Tensor wrapper_tensor(const at::Tensor& physical, std::int64_t channels) {
  const at::IntArrayRef sizes = physical.sizes();
  c10::SmallVector<std::int64_t, 5> dims(sizes.begin(), sizes.end() - 1);
  dims[1] = channels;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, physical.nbytes(),
                       c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  storage.set_data_ptr_noswap(at::DataPtr{nullptr, physical.device()});
  const c10::DispatchKeySet keys{physical.options().computeDispatchKey()};
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, physical.dtype());
  deny_memory(tensor);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(dims);
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  return tensor;
}

constexpr const char* kOp = "BlockedTensor";

void check_tail_of_any(const at::Tensor& physical, std::int64_t channels) {
  if (!physical.is_cpu() || physical.numel() == 0) return;
  // This reads the values themselves, so no mode may trace it.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Functionalize,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  check_tail(kOp, physical, channels, "set these lanes to 0, or make it with to_blocked");
}

// The same rules as blocked_argument, for a tensor on any device.
void check_physical(const at::Tensor& physical, std::int64_t channels) {
  if (physical.layout() != at::kStrided || physical.is_quantized()) {
    fail_type(kOp, "a strided physical tensor", physical.toString(), "make it with to_blocked");
  }
  const at::IntArrayRef sizes = physical.sizes();
  if (sizes.size() < 4 || sizes.size() > 6 || !Format::is_block(sizes.back())) {
    fail_value(kOp,
               "a physical tensor [N, ceil(C/b), *spatial, b] of 4 to 6 dims with b = 4, 8, 16 or "
               "32",
               text(sizes), "make it with to_blocked");
  }
  const std::int64_t blocks = Format::blocked(sizes.back()).blocks(channels);
  if (channels < 0 || blocks != sizes[1]) {
    fail_value(kOp, text("ceil(C/b) = ", blocks, " blocks for C = ", channels),
               text(sizes[1], " in ", sizes), "pass the logical channel count");
  }
  if (checks_tails()) check_tail_of_any(physical, channels);
}

PyObject* wrap(PyTypeObject* type, PyObject* physical_object, PyObject* channels_object) {
  static PyObject* const physical_name = PyUnicode_InternFromString("_physical");
  static PyObject* const channels_name = PyUnicode_InternFromString("_channels");
  if (!THPVariable_Check(physical_object)) {
    fail_type(kOp, "a physical tensor", Py_TYPE(physical_object)->tp_name,
              "make it with to_blocked");
  }
  const at::Tensor& physical = THPVariable_Unpack(physical_object);
  const std::int64_t channels = PyLong_AsLongLong(channels_object);
  if (PyErr_Occurred()) return nullptr;
  check_physical(physical, channels);
  // torch.jit.trace sees neither the wrapper nor how it is made.
  if (c10::impl::tls_is_dispatch_key_included(at::DispatchKey::Tracer)) {
    fail_not_implemented(kOp,
                         "torch.compile or torch.export for a program that makes blocked tensors",
                         "torch.jit.trace", "give the traced model a blocked input instead");
  }
  PyObject* object = THPVariable_Wrap(wrapper_tensor(physical, channels), type);
  if (object && (PyObject_SetAttr(object, physical_name, physical_object) ||
                 PyObject_SetAttr(object, channels_name, channels_object))) {
    Py_CLEAR(object);
  }
  return object;
}

// wrap(cls, physical, channels): a blocked tensor of class `cls`. `physical` is a torch.Tensor and
// no subclass.
PyObject* wrap_method(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyType_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "torch_blocked::wrap: expected (cls, physical, channels)");
    return nullptr;
  }
  try {
    return wrap(reinterpret_cast<PyTypeObject*>(args[0]), args[1], args[2]);
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
    return nullptr;
  } catch (const NotImplementedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef wrap_definition{
    "wrap", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wrap_method)), METH_FASTCALL,
    "wrap(cls, physical, channels): a blocked tensor of class cls around a plain tensor"};

// For in-place ops that change dims: gives the same object the dims, dtype and storage of `other`.
// Its version counter and its place in the autograd graph stay.
void take_metadata(const at::Tensor& self, const at::Tensor& other) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->shallow_copy_from(other.getIntrusivePtr());
  impl->set_python_dispatch(other.unsafeGetTensorImpl()->is_python_dispatch());
}

// Makes `self` count its writes together with `other`, as a view does.
void share_version(const at::Tensor& self, const at::Tensor& other) {
  if (self.is_inference() || other.is_inference()) return;
  self.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

// Makes `self` share the storage of `other`, as a view does. ATen then knows that both are the same
// memory.
void share_storage(const at::Tensor& self, const at::Tensor& other) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
}

}  // namespace

void bind_wrapper(py::module_& m) {
  m.add_object("wrap", PyCFunction_New(&wrap_definition, nullptr));
  m.def("deny_memory", &deny_memory);
  m.def("take_metadata", &take_metadata);
  m.def("share_storage", &share_storage);
  m.def("share_version", &share_version);
}

}  // namespace torch_blocked
