// The Python module: importing it registers the operators of ops.cpp.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>

#include "cuda/kernels/types.h"

namespace {

// The text, or None for null.
PyObject* reason(const char* problem) {
  if (problem == nullptr) Py_RETURN_NONE;
  return PyUnicode_FromString(problem);
}

// All kernels are compiled for the same GPUs: one speaks for the others.
PyObject* why_not(PyObject*, PyObject*) {
  return reason(bahdanau_fast::gpu::kernels_f32.why_not());
}

PyObject* without_clusters(PyObject*, PyObject*) {
  bahdanau_fast::gpu::clusters_on = false;
  Py_RETURN_NONE;
}

PyObject* why_not_decode(PyObject*, PyObject* args) {
  int lstm = 0, backward = 0;
  long long B = 0, Tk = 0, F = 0, Dv = 0, H = 0, V = 0, T = 0;
  if (!PyArg_ParseTuple(args, "ppLLLLLLL", &lstm, &backward, &B, &Tk, &F, &Dv, &H, &V, &T))
    return nullptr;
  bahdanau_fast::gpu::Decoder d;
  d.lstm = lstm != 0, d.backward = backward != 0, d.H = H, d.V = V, d.T = T;
  d.p.B = B, d.p.Tq = 1, d.p.Tk = Tk, d.p.H = F, d.p.Dv = Dv;
  try {
    return reason(bahdanau_fast::gpu::why_not_decode(d));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef functions[] = {
    {"why_not", why_not, METH_NOARGS,
     "What keeps the kernels from running on the current GPU; None if nothing does."},
    {"without_clusters", without_clusters, METH_NOARGS,
     "Nothing meets in a cluster from now on; to be called before all others."},
    {"why_not_decode", why_not_decode, METH_VARARGS,
     "What keeps all steps of a decoder (lstm, backward, B, Tk, F, Dv, H, V, T) from one launch on "
     "the current GPU, in 16 bits; None if nothing does."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA C++ kernels of bahdanau_fast.", -1,
                       functions};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda(void) { return PyModule_Create(&definition); }
