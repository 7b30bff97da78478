// Memory that a loop uses while it runs.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

// n numbers that begin at a cache line, all zero; they are freed at the end of the scope.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t n) : size_(n) {
    int64_t bytes = (n * int64_t(sizeof(T)) + 127) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) std::abort();
    std::memset(data_, 0, bytes);
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() { return data_; }
  operator const T*() const { return data_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  T* data_;
  int64_t size_;
};
