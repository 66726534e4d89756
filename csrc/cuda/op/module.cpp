// The Python module: importing it registers the operators of ops.cpp.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_C_cuda",
                          "CUDA C++ kernels of bahdanau_fast.",
                          -1,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda(void) { return PyModule_Create(&definition); }
