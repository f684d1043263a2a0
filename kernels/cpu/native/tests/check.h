// What the bit tests share: random numbers, memory that notices a stray access, and the verdict.
#pragma once
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../types.h"

namespace check {

// splitmix64 (Steele, Lea, Flood 2014): the same numbers on every machine
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int between(int low, int high) {  // both included
    return low + int(bits() % uint64_t(int64_t(high) - low + 1));
  }
  float unit() { return float(int64_t(bits() >> 40) - (1 << 23)) * 0x1p-23f; }  // [-1, 1)
  std::vector<float> floats(int n, float scale = 1.0f) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = unit() * scale;
    return x;
  }

 private:
  uint64_t state_;
};

// What a kernel reads: the last element touches a page that nobody may read.
template <class T>
class Input {
 public:
  explicit Input(const std::vector<T>& from) : bytes_(from.size() * sizeof(T)) {
    map_bytes_ = (bytes_ + kPage - 1) / kPage * kPage + kPage;
    map_ = static_cast<uint8_t*>(
        mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || mprotect(map_ + map_bytes_ - kPage, kPage, PROT_NONE)) std::abort();
    if (bytes_) std::memcpy(data(), from.data(), bytes_);
  }
  ~Input() { munmap(map_, map_bytes_); }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;
  T* data() const { return reinterpret_cast<T*>(map_ + map_bytes_ - kPage - bytes_); }

 private:
  static constexpr size_t kPage = 1 << 16;
  size_t bytes_, map_bytes_;
  uint8_t* map_;
};

// What a kernel writes: known bytes before and behind.
template <class T>
class Output {
 public:
  explicit Output(size_t n) : n_(n), raw_(n * sizeof(T) + 2 * kGuard, kFill) {}
  T* data() { return reinterpret_cast<T*>(raw_.data() + kGuard); }
  const T& operator[](size_t i) { return data()[i]; }
  bool intact() const {
    for (size_t i = 0; i < kGuard; i++)
      if (raw_[i] != kFill || raw_[raw_.size() - 1 - i] != kFill) return false;
    return true;
  }
  static bool untouched(const T& value) {
    uint8_t bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    for (uint8_t b : bytes)
      if (b != kFill) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr uint8_t kFill = 0xa5;
  size_t n_;
  std::vector<uint8_t> raw_;
};

// One group of cases on one instruction set. The digest is over the bits of every expected result.
class Report {
 public:
  explicit Report(const char* group) : group_(group) {}
  void begin(const char* isa) {
    isa_ = isa;
    digest_ = 0xcbf29ce484222325u;
    cases_ = shown_ = 0;
  }
  void same_float(float got, float want, const std::string& where, const char* what = "") {
    uint32_t g, w;
    std::memcpy(&g, &got, 4);
    std::memcpy(&w, &want, 4);
    if (got != got) g = 0x7fc00000u;  // which NaN it is differs between processors
    if (want != want) w = 0x7fc00000u;
    add(g, w, where, what);
  }
  void same(int64_t got, int64_t want, const std::string& where, const char* what = "") {
    add(uint64_t(got), uint64_t(want), where, what);
  }
  void same_double(double got, double want, const std::string& where) {
    uint64_t g, w;
    std::memcpy(&g, &got, 8);
    std::memcpy(&w, &want, 8);
    add(g, w, where, "");
  }
  void holds(bool condition, const std::string& where, const char* what = "") {
    add(condition, true, where, what);
  }
  void next_case() { cases_++; }
  int cases() const { return cases_; }
  int failures() const { return failures_; }
  uint64_t digest() const { return digest_; }

 private:
  void add(uint64_t got, uint64_t want, const std::string& where, const char* what) {
    digest_ = (digest_ ^ got) * 0x100000001b3u;
    if (got == want) return;
    failures_++;
    if (shown_++ < 8)
      std::fprintf(stderr, "%s, %s, %s%s: got %" PRIx64 ", expected %" PRIx64 "\n", group_, isa_,
                   where.c_str(), what, got, want);
  }

  const char *group_, *isa_ = "";
  uint64_t digest_ = 0;
  int cases_ = 0, failures_ = 0, shown_ = 0;
};

void linear_cases(const edge::Isa& isa, Report& report);
void quantiser_cases(const edge::Isa& isa, Report& report);
void silu_cases(const edge::Isa& isa, Report& report);
void argmax_cases(const edge::Isa& isa, Report& report);
void sampling_cases(const edge::Isa& isa, Report& report);
void checksum_cases(const edge::Isa& isa, Report& report);
void rope_cases(const edge::Isa& isa, Report& report);
void attention_cases(const edge::Isa& isa, Report& report);

}  // namespace check
