// AVX-512 with VNNI: one zmm register is a chunk of a tile, 16 rows by 4 inputs.
//
// vpdpbusd multiplies unsigned bytes (the codes plus an offset, 0…255) with signed ones (the
// activations) and adds four products to each lane; the offset leaves through the sums of the
// activations. It does not saturate (vpdpbusds does). Source: Intel's intrinsics guide.
#include "types.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace edge {
namespace {

constexpr int kTileRows = 8;  // rows of activations that share one load of weights
constexpr int kDotRows = 8;  // the same for attention
constexpr int kOffset = 136;  // of both nibbles above a code; of one alone it is 8

template <bool w8>
inline void codes_of(const uint8_t* base, const uint8_t* refine, __m512i& low, __m512i& high) {
  const __m512i b = _mm512_loadu_si512(base);
  if constexpr (w8) {
    const __m512i r = _mm512_loadu_si512(refine), top = _mm512_set1_epi8(char(0xf0));
    // 0xca: where top then the second, else the third operand
    low = _mm512_ternarylogic_epi32(top, _mm512_slli_epi16(b, 4), r, 0xca);
    high = _mm512_ternarylogic_epi32(top, b, _mm512_srli_epi16(r, 4), 0xca);
  } else {
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    low = _mm512_and_si512(b, nibble);
    high = _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble);
  }
}

// acc += codes · four activations, the same four in each lane. In assembly for the broadcast inside
// the instruction: gcc loads it apart, at half the speed (2.0 against 3.6 a nanosecond, Zen 4).
inline void add_dots(__m512i& acc, __m512i codes, const int8_t* a) {
  using Word [[gnu::may_alias]] = int32_t;
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(codes), "m"(*reinterpret_cast<const Word*>(a)));
}

// Sums of M activations over T registers of rows, as fields and not as an array: gcc keeps fields in
// registers and, in these loops, arrays in memory (half the speed).
template <int M, int T>
struct Sums {
  Sums<M - 1, T> before;
  __m512i first, second;
};

template <int T>
struct Sums<0, T> {};

struct Codes {
  __m512i low, high;
};

template <int M, int T>
[[gnu::always_inline]] inline void start(Sums<M, T>& s, int offset, const int32_t* sums,
                                         int groups) {
  if constexpr (M > 0) {
    start(s.before, offset, sums, groups);
    s.first = s.second = _mm512_set1_epi32(-offset * sums[int64_t(M - 1) * groups]);
  }
}

template <int M, int T>
[[gnu::always_inline]] inline void add_chunk(Sums<M, T>& s, const Codes& x, const Codes& y,
                                             const int8_t* low, const int8_t* high, int64_t row) {
  if constexpr (M > 0) {
    add_chunk(s.before, x, y, low, high, row);
    add_dots(s.first, x.low, low + (M - 1) * row);
    if constexpr (T == 2) add_dots(s.second, y.low, low + (M - 1) * row);
    add_dots(s.first, x.high, high + (M - 1) * row);
    if constexpr (T == 2) add_dots(s.second, y.high, high + (M - 1) * row);
  }
}

// With this many activations the processor no longer looks far enough ahead by itself: fetching this
// far ahead into the second cache takes 5 activations from 15 to 25 GB/s; with fewer it costs a fifth
// (one core, Zen 4, tools/LOG.md).
constexpr int kAheadRows = 2, kAhead = 4096;

// always inline: gcc drops calls of a function that does nothing but fetch
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* plane) {
  _mm_prefetch(reinterpret_cast<const char*>(plane) + kAhead, _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(plane) + kAhead + 64, _MM_HINT_T1);
}

// Dots of one group. Input k of activation m is at a[m * row + k / 4 * step + k % 4].
template <bool w8, int M, int T>
[[gnu::always_inline]] inline void group_dots(const uint8_t* base, const uint8_t* refine, int G,
                                              const int8_t* a, int64_t row, int64_t step,
                                              const int32_t* sums, int groups, Sums<M, T>& s) {
  start(s, w8 ? kOffset : 8, sums, groups);
  const int8_t* high = a + G / 8 * step;
  for (int c = 0; c < G / 8; c++, a += step, high += step, base += T * 64, refine += T * 64) {
    if constexpr (T == 2 && (!w8 || M >= kAheadRows)) {
      fetch_ahead(base);
      if (w8) fetch_ahead(refine);
    }
    Codes x, y;
    codes_of<w8>(base, refine, x.low, x.high);
    if constexpr (T == 2) codes_of<w8>(base + 64, refine + 64, y.low, y.high);
    add_chunk(s, x, y, a, high, row);
  }
}

// 64-bit sums of the even and the odd rows of a register
struct Wide {
  __m512i even, odd;

  [[gnu::always_inline]] void add(__m512i dots, __m512i mult) {
    even = _mm512_add_epi64(even, _mm512_mul_epi32(dots, mult));
    dots = _mm512_srli_epi64(dots, 32), mult = _mm512_srli_epi64(mult, 32);
    odd = _mm512_add_epi64(odd, _mm512_mul_epi32(dots, mult));
  }

  // rounded once, rows in order
  __m512 floats(int shift) const {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m256 e = _mm512_cvtepi64_ps(_mm512_slli_epi64(even, shift));
    const __m256 o = _mm512_cvtepi64_ps(_mm512_slli_epi64(odd, shift));
    return _mm512_permutex2var_ps(_mm512_castps256_ps512(e), order, _mm512_castps256_ps512(o));
  }
};

inline __m512i multipliers(const int16_t* mult) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(mult)));
}

template <int M>
struct Totals {
  Totals<M - 1> before;
  Wide first, second;
};

template <>
struct Totals<0> {};

template <int M>
[[gnu::always_inline]] inline void clear(Totals<M>& total) {
  if constexpr (M > 0) {
    clear(total.before);
    total.first.even = total.first.odd = _mm512_setzero_si512();
    total.second = total.first;
  }
}

template <int M>
[[gnu::always_inline]] inline void add_group(Totals<M>& total, const Sums<M, 2>& s, __m512i first,
                                             __m512i second) {
  if constexpr (M > 0) {
    add_group(total.before, s.before, first, second);
    total.first.add(s.first, first);
    total.second.add(s.second, second);
  }
}

template <int M, int all>
[[gnu::always_inline]] inline void store(const Totals<M>& total, int shift, float (*out)[kRows]) {
  if constexpr (M > 0) {
    store<M - 1, all>(total.before, shift, out);
    _mm512_storeu_ps(out[M - 1], total.first.floats(shift));
    _mm512_storeu_ps(out[all + M - 1], total.second.floats(shift));
  }
}

template <bool w8, int M>
struct Tile {
  static void run(const Linear& L, int tile, const int8_t* codes, int64_t, int interleave,
                  const int32_t* sums, int groups, float (*out)[kRows]) {
    const int64_t bytes = int64_t(L.Kp) * (kTile / 2);
    const int G = L.G, count = L.Kp / G;
    const uint8_t *base = L.base + tile * bytes, *refine = L.refine + tile * bytes;
    const int16_t* mult = L.mult + int64_t(tile) * count * kTile;
    Totals<M> total;
    clear(total);
    for (int g = 0; g < count; g++, mult += kTile) {
      Sums<M, 2> s;
      group_dots<w8, M, 2>(base, refine, G, codes + int64_t(g) * G * interleave, 4, 4 * interleave,
                           sums + g, groups, s);
      base += G * (kTile / 2);
      refine += G * (kTile / 2);
      add_group(total, s, multipliers(mult), multipliers(mult + kRows));
    }
    store<M, M>(total, w8 ? 0 : 4, out);
  }
};

template <int M>
[[gnu::always_inline]] inline void store(const Sums<M, 1>& s, int32_t* out, int stride) {
  if constexpr (M > 0) {
    store(s.before, out, stride);
    _mm512_storeu_si512(out + (M - 1) * stride, s.first);
  }
}

template <bool w8, int M>
void dots_rows(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
               const int32_t* sums, int32_t* out, int out_stride) {
  Sums<M, 1> s;
  group_dots<w8, M, 1>(base, refine, K, a, stride, 4, sums, 1, s);
  store(s, out, out_stride);
}

#include "dots.inl"

#include "floats.inl"

#include "linear.inl"

#include "sampling.inl"

#include "attention.inl"

}  // namespace

const Isa* isa_avx512() { return table("avx512_vnni", kTileRows); }

}  // namespace edge

#else

namespace edge {
const Isa* isa_avx512() { return nullptr; }
}  // namespace edge

#endif
