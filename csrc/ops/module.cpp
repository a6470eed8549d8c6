// Entry point of the extension module hstree._C. Importing it loads the shared library, whose static
// initializers register the operators of the namespace hstree; the module itself has no members.
//
// It also lets Ctrl-C end a CPU operator, on the thread that imports it: Python's main thread, as others receive
// no signals. Where a program has its own handler of SIGINT, that runs after the operator.
#include <Python.h>

#include <csignal>
#include <memory>
#include <stdexcept>

#include "cpu/interrupt.h"

namespace {

// Leaves an operator as KeyboardInterrupt. torch translates every std::exception to RuntimeError; the exception
// is freed after that, and then replaces the error. Where C++ code has dropped it, the signal is raised again.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("hstree: interrupted by Ctrl-C") {}

 private:
  static void raise(void*) {
    const PyGILState_STATE state = PyGILState_Ensure();
    if (PyErr_Occurred()) {
      PyErr_SetNone(PyExc_KeyboardInterrupt);
    } else {
      PyErr_SetInterrupt();
    }
    PyGILState_Release(state);
  }

  std::shared_ptr<void> last_{nullptr, raise};  // shared by copies
};

// Whether SIGINT has Python's own handler, which raises KeyboardInterrupt. Py_DecRef, a function that accepts null:
// Py_XDECREF would need a private one.
bool has_default_handler() {
  PyObject* const signal = PyImport_ImportModule("_signal");
  PyObject* const handler = signal ? PyObject_CallMethod(signal, "getsignal", "i", SIGINT) : nullptr;
  PyObject* const expected = signal ? PyObject_GetAttrString(signal, "default_int_handler") : nullptr;
  const bool same = handler && handler == expected;
  if (!handler || !expected) PyErr_Clear();
  Py_DecRef(expected);
  Py_DecRef(handler);
  Py_DecRef(signal);
  return same;
}

// Runs no Python code.
void check_interrupt() {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool interrupted = has_default_handler() && PyOS_InterruptOccurred();
  PyGILState_Release(state);
  if (interrupted) throw Interrupted();
}

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_C",
                                   "Operators torch.ops.hstree.*",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  hstree::cpu::check_on_this_thread(check_interrupt);
  return PyModule_Create(&definition);
}
