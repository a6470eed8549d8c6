// Entry point of the extension module hstree._C. Importing it loads the shared library, whose static
// initializers register the operators of the namespace hstree; the module itself has no members.
#include <Python.h>

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
  return PyModule_Create(&definition);
}
