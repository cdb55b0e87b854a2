// Python objects of blocked tensors, made without the interpreter: torch's own way of making one
// (Tensor._make_wrapper_subclass, and two attributes) takes longer than a small op.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_blocked {
namespace {

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
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(dims);
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  return tensor;
}

PyObject* wrap(PyTypeObject* type, PyObject* physical_object, PyObject* channels_object) {
  static PyObject* const physical_name = PyUnicode_InternFromString("_physical");
  static PyObject* const channels_name = PyUnicode_InternFromString("_channels");
  const at::Tensor& physical = THPVariable_Unpack(physical_object);
  const std::int64_t channels = PyLong_AsLongLong(channels_object);
  if (PyErr_Occurred()) return nullptr;
  if (physical.dim() < 4 || physical.dim() > 6) {
    return PyErr_Format(PyExc_ValueError,
                        "torch_blocked::BlockedTensor: expected a physical tensor [N, ceil(C/b), "
                        "*spatial, b] of 4 to 6 dims, got %lld; make it with to_blocked",
                        static_cast<long long>(physical.dim()));
  }
  PyObject* object = THPVariable_Wrap(wrapper_tensor(physical, channels), type);
  if (object && (PyObject_SetAttr(object, physical_name, physical_object) ||
                 PyObject_SetAttr(object, channels_name, channels_object))) {
    Py_CLEAR(object);
  }
  return object;
}

// wrap(cls, physical, channels): a blocked tensor of class `cls`; physical is a torch.Tensor, of no
// subclass.
PyObject* wrap_method(PyObject*, PyObject* const* args, Py_ssize_t) {
  try {
    return wrap(reinterpret_cast<PyTypeObject*>(args[0]), args[1], args[2]);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef wrap_definition{
    "wrap", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wrap_method)), METH_FASTCALL,
    "wrap(cls, physical, channels): a blocked tensor of class cls around a plain tensor"};

// What an in-place op that changes dims needs: the same object with the dims, dtype and storage of
// `other`. Its version counter and its place in the autograd graph stay.
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

}  // namespace

void bind_wrapper(py::module_& m) {
  m.add_object("wrap", PyCFunction_New(&wrap_definition, nullptr));
  m.def("take_metadata", &take_metadata);
  m.def("share_version", &share_version);
}

}  // namespace torch_blocked
