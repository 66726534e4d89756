// The Python module: importing it registers the operators of ops.cpp.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cuda/kernels/types.h"

namespace {

// All kernels are compiled for the same GPUs: one speaks for the others.
PyObject* why_not(PyObject*, PyObject*) {
  const char* problem = bahdanau_fast::gpu::kernels_f32.why_not();
  if (problem == nullptr) Py_RETURN_NONE;
  return PyUnicode_FromString(problem);
}

PyMethodDef functions[] = {
    {"why_not", why_not, METH_NOARGS,
     "What keeps the kernels from running on the current GPU; None if nothing does."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_C_cuda",
                          "CUDA C++ kernels of bahdanau_fast.",
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda(void) { return PyModule_Create(&definition); }
