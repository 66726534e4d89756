// Four symbols that GCC's headers take from glibc after 2.28 or from libstdc++ after GCC 8. With
// them here the binary loads on older systems too (manylinux_2_28), whatever system it is built on.
// A static libstdc++ would not help: it needs the new glibc itself. Not exported: nothing else in
// the process sees them. Weak, since a static libstdc++ may define them as well; a shared one's are
// never taken in their place. `make dist` fails when a compiler takes more.
#include <new>
#include <sstream>

#if defined(__linux__) && defined(__GLIBCXX__)

extern "C" {

// glibc's flag "no second thread was started". False, it only makes shared_ptr count atomically.
[[gnu::weak]] char __libc_single_threaded = 0;

[[noreturn, gnu::weak]] void bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void bad_array_new_length() { throw std::bad_array_new_length(); }

// The constructors of std::ostringstream and std::stringstream without an argument.
[[gnu::weak]] void ostringstream(void* self) __asm__(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void ostringstream(void* self) { new (self) std::ostringstream(std::ios_base::out); }

[[gnu::weak]] void stringstream(void* self) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void stringstream(void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}

}  // extern "C"

#endif
