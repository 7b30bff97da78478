// Which instruction sets this processor has: a library of its own, compiled for every processor, that is asked first.
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>

// Whether the processor has the instructions F16C, which Clang's __builtin_cpu_supports does not know.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Whether code of an instruction set of `build.py` runs here.
extern "C" __attribute__((visibility("default"))) int has_instruction_set(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
            __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (std::strcmp(name, "x86-64-v3") == 0) return v3;
  if (std::strcmp(name, "x86-64-v4") == 0) return v4;
  if (std::strcmp(name, "x86-64-v4-bf16") == 0) {
    return v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  }
  return 0;
#else
  return std::strcmp(name, "armv8") == 0;
#endif
}
