// The Python module: importing it registers the operators with the CPU dispatch key.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "common/limits.h"
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

PyObject* most_table_elements_in_fp64(PyObject*, PyObject* precise) {
  using namespace bahdanau_fast;
  return PyLong_FromLongLong(PyObject_IsTrue(precise) ? kMaxFp64CpuElements
                                                      : kMaxFp64ForwardTableElements);
}

PyMethodDef methods[] = {
    {"instruction_set", get_instruction_set, METH_NOARGS, "The instruction set in use."},
    {"set_instruction_set", set_instruction_set, METH_VARARGS,
     "Use a lesser instruction set, for tests: 'baseline', 'avx2' or 'avx512'."},
    {"most_table_elements_in_fp64", most_table_elements_in_fp64, METH_O,
     "Up to how many elements fp32 keys get a table in fp64, if precise or not."},
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
