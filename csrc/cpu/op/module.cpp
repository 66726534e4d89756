// The Python module: importing it registers the operators of ops.cpp with the CPU dispatch key.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "cpu/isa/dispatch.h"

namespace {

using bahdanau_fast::InstructionSet;

PyObject* get_instruction_set(PyObject*, PyObject*) {
  return PyUnicode_FromString(
      bahdanau_fast::kInstructionSetNames[static_cast<int>(bahdanau_fast::instruction_set())]);
}

PyObject* set_instruction_set(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
  for (int i = 0; i < 3; ++i) {
    const InstructionSet isa = static_cast<InstructionSet>(i);
    if (std::strcmp(name, bahdanau_fast::kInstructionSetNames[i]) != 0) continue;
    if (!bahdanau_fast::supported(isa)) break;
    bahdanau_fast::set_instruction_set(isa);
    Py_RETURN_NONE;
  }
  PyErr_Format(PyExc_ValueError, "name must be an instruction set this processor has, got '%s'",
               name);
  return nullptr;
}

PyMethodDef methods[] = {
    {"instruction_set", get_instruction_set, METH_NOARGS, "The instruction set in use."},
    {"set_instruction_set", set_instruction_set, METH_VARARGS,
     "Use a lesser instruction set, for tests: 'baseline', 'avx2' or 'avx512'."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_C_cpu",
                          "C++ CPU kernels of bahdanau_fast.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cpu(void) { return PyModule_Create(&definition); }
