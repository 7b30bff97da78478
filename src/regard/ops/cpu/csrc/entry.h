// The functions that Python calls: each takes the address of its arguments, in one or more threads at once.
#pragma once

// Defines the entries name_f32, name_bf16 and name_fp16 of a function template over the type of stored numbers.
#define REGARD_ENTRIES(name, Arguments, function)                                                                       \
  extern "C" {                                                                                                          \
  __attribute__((visibility("default"))) void name##_f32(void* call) { function<float>(static_cast<Arguments*>(call)); } \
  __attribute__((visibility("default"))) void name##_bf16(void* call) { function<bf16>(static_cast<Arguments*>(call)); } \
  __attribute__((visibility("default"))) void name##_fp16(void* call) { function<fp16>(static_cast<Arguments*>(call)); } \
  }
