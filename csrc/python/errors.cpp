// Maps the error types of format/errors.h onto Python exceptions.
#include "format/errors.h"

#include <pybind11/pybind11.h>

#include <exception>

namespace torch_blocked {

void bind_errors(pybind11::module_& m) {
  m.def("shortened", &shortened, "a value as an error shows it");
  pybind11::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const TypeError& e) {
      PyErr_SetString(PyExc_TypeError, e.what());
    } catch (const NotImplementedError& e) {
      PyErr_SetString(PyExc_NotImplementedError, e.what());
    } catch (const OneDnnError& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
  });
}

}  // namespace torch_blocked
