// RoPE, writing of the nested cache, and attention over it (kernels/ops.py), once for every
// instruction set, over the one integer primitive each of them has:
//
//   dots16(base, refine, K, a, stride, sums, rows, out)   out[r][n] = sum_k code[n][k] * a[r][k]
//
// for a tile of 16 rows n; refine null: the code is q4 alone (times 16 by the caller). Given zeros as
// sums it leaves kOffset, or 8 for q4 alone, in every code. Included inside an anonymous namespace by
// each isa_*.cpp, after floats.inl and dots16.

struct Nested {
  int32_t q4[kMaxDim + 32], qr[kMaxDim + 32];  // zero for 32 numbers behind the last
  uint16_t scale;
};

void nest(const float* x, int D, Nested& out) {
  out.scale = half_up(peak_of(x, D) / 7.4375f);
  const float wide = half_to_float(out.scale);
  const float safe = wide > 0 ? wide : 1.0f;
  const float step = safe / 16.0f;
  for (int i = 0; i < D; i++) {
    float q = round_even(x[i] / safe);
    q = q > 7.0f ? 7.0f : q;
    q = q < -8.0f ? -8.0f : q;
    float r = round_even((x[i] - q * safe) / step);
    const float low = q == -8.0f ? 0.0f : -8.0f;
    r = r < low ? low : r;
    r = r > 7.0f ? 7.0f : r;
    out.q4[i] = int32_t(q);
    out.qr[i] = int32_t(r);
  }
  std::memset(out.q4 + D, 0, 32 * sizeof(int32_t));
  std::memset(out.qr + D, 0, 32 * sizeof(int32_t));
}

uint8_t* record(const CacheLayer& cache, int kv_head, int64_t block) {
  return cache.data + block * cache.block_stride + kv_head * record_bytes(cache.Dk, cache.Dv);
}

// Ask for a record early: streaming the weights has thrown the cache of the last layer out. Always
// inline: gcc drops calls of a function that does nothing but fetch.
[[gnu::always_inline]] inline void fetch_record(const CacheLayer& cache, int kv_head, int block) {
  const uint8_t* rec = record(cache, kv_head, block);
  for (int64_t i = 0; i < record_bytes(cache.Dk, cache.Dv); i += 64)
    __builtin_prefetch(rec + i, 0, 2);
}

uint16_t* scales(uint8_t* rec, const CacheLayer& cache, int kind) {
  return reinterpret_cast<uint16_t*>(rec + int64_t(kBlock) * (cache.Dk + cache.Dv)) + kind * kBlock;
}

inline Whole whole(const int32_t* x) { return *reinterpret_cast<const Whole*>(x); }

// One token's nibbles of a key into a plane, from its place in the first chunk on.
void write_key(const int32_t* q, int half, uint8_t* plane) {
  int8_t bytes[kMaxDim / 2 + 16];
  for (int i = 0; i < half; i += 16) {
    const Whole both = ((whole(q + i) + 8) & 15) | ((whole(q + i + half) + 8) << 4);
    *reinterpret_cast<Bytes*>(bytes + i) = __builtin_convertvector(both, Bytes);
  }
  for (int i = 0; i < half; i += 4) std::memcpy(plane + i / 4 * 64, bytes + i, 4);
}

// One token's nibbles of a value: 16 dims a line, one nibble of each word.
void write_value(const int32_t* q, int Dv, int t, uint8_t* plane) {
  const int u = t % (kBlock / 2), shift = u % 4 * 8 + (t < kBlock / 2 ? 0 : 4);
  const int32_t keep = int32_t(~(0xfu << shift));
  plane += u / 4 * 64;
  for (int d = 0; d < Dv; d += kRows, plane += kBlock * 8) {
    Whole& line = *reinterpret_cast<Whole*>(plane);
    line = (line & keep) | (((whole(q + d) + 8) & 15) << shift);  // NaN reaches no other nibble
  }
}

// One butterfly of a stride below 16: lanes without its bit hold a + b, lanes with it a - b.
template <int stride>
[[gnu::always_inline]] inline Lanes butterfly(Lanes x) {
  constexpr Whole kCount{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lanes other = __builtin_shuffle(x, kCount ^ stride);
  return other + ((kCount & stride) == 0 ? x : -x);
}

// Walsh-Hadamard transform without its scale, strides rising (kernels/reference/numeric.py).
void hadamard(float* x, int D) {
  int stride = 1;
  if (D >= 16) {
    for (int i = 0; i < D; i += 16) {
      Lanes v = lanes(x + i);
      v = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v))));
      *reinterpret_cast<Lanes*>(x + i) = v;
    }
    stride = 16;
  }
  for (; stride < D; stride *= 2)
    for (int a = 0; a < D; a += 2 * stride)
      for (int i = a; i < a + stride; i++) {
        const float low = x[i], high = x[i + stride];
        x[i] = low + high;
        x[i + stride] = low - high;
      }
}

void rotate(const float* x, const float* norm, float eps, const float* cos, const float* sin,
            const Geometry& g, float* out) {
  const int D = g.head_dim, half = D / 2;
  float normed[kMaxDim];
  if (norm) {
    const float factor = inverse_rms(x, D, eps);
    for (int i = 0; i < D; i++) normed[i] = (x[i] * factor) * norm[i];
    x = normed;
  }
  float y[kMaxDim];
  for (int i = 0; i < half; i++) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
  if (!g.rotate_kv) {
    std::memcpy(out, y, sizeof(float) * size_t(D));
    return;
  }
  hadamard(y, D);
  for (int i = 0; i < D; i++) out[i] = y[i] * g.softmax_scale;  // 1/sqrt(D) as well
}

void rotate_queries(const Geometry& g, const float* qkv, const float* cos, const float* sin,
                    const float* q_norm, float eps, int kv_head, int64_t position, float* q_out) {
  const int D = g.head_dim, group = g.num_heads / g.num_kv_heads;
  for (int h = kv_head * group; h < (kv_head + 1) * group; h++)
    rotate(qkv + h * D, q_norm, eps, cos + position * (D / 2), sin + position * (D / 2), g,
           q_out + h * D);
}

void write_kv(const Geometry& g, const float* qkv, const float* cos, const float* sin,
              const float* k_norm, float eps, int kv_head, int64_t position,
              const CacheLayer& cache) {
  const int D = g.head_dim;
  float key[kMaxDim];
  Nested nested;
  rotate(qkv + (g.num_heads + kv_head) * D, k_norm, eps, cos + position * (D / 2),
         sin + position * (D / 2), g, key);
  uint8_t* rec = record(cache, kv_head, position / kBlock);
  const int t = int(position % kBlock);
  nest(key, D, nested);
  uint8_t* plane = rec + t / kRows * (cache.Dk * 8) + t % kRows * 4;
  write_key(nested.q4, cache.Dk / 2, plane);
  write_key(nested.qr, cache.Dk / 2, plane + kBlock * cache.Dk / 2);
  scales(rec, cache, 0)[t] = nested.scale;
  nest(qkv + (g.num_heads + g.num_kv_heads + kv_head) * D, D, nested);
  plane = rec + int64_t(kBlock) * cache.Dk;
  write_value(nested.q4, cache.Dv, t, plane);
  write_value(nested.qr, cache.Dv, t, plane + kBlock * cache.Dv / 2);
  scales(rec, cache, 1)[t] = nested.scale;
}

// Query vectors of one call, quantised once.
struct Queries {
  int8_t codes[kMaxQuery * kMaxDim + 16];
  float scale[kMaxQuery];
  int32_t sums[kMaxQuery];
  int32_t count;
};

// Weights of 64 tokens as two int8 limbs, w = 128 (high + 128) + low, then a row of ones. The offset
// of the codes leaves all at once, with the sum of the weights.
struct Weights {
  int8_t limbs[(2 * kMaxQuery + 1) * kBlock];
  int32_t sums[kMaxQuery];
  float step[kMaxQuery];
};

constexpr int32_t kNoSums[2 * kMaxQuery + 1] = {};

// One query vector against 64 scores: block maximum, sum, fixed-point weights.
void softmax_block(const int32_t* dots, float factor, int shift, const float* ks, const float* vs,
                   int visible, float* partial, int8_t* high, int8_t* low, int32_t* sum,
                   float* step) {
  constexpr int kVectors = kBlock / 16;
  constexpr Whole kCount{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Lanes s[kVectors], w[kVectors];
  for (int v = 0; v < kVectors; v++) {
    const Whole dot = *reinterpret_cast<const Whole*>(dots + 16 * v) * shift;
    s[v] = (__builtin_convertvector(dot, Lanes) * factor) * lanes(ks + 16 * v);
    s[v] = kCount + 16 * v < visible ? s[v] : Lanes{} - INFINITY;
  }
  const float most = max_lane(larger(larger(s[3], s[2]), larger(s[1], s[0])));
  const float from = most > -3e38f ? most : -3e38f;
  for (int v = 0; v < kVectors; v++) s[v] = exp_nonpositive(s[v] - from);
  for (int v = 0; v < kVectors; v++)
    w[v] = kCount + 16 * v < visible ? s[v] * lanes(vs + 16 * v) : Lanes{};
  float peak = peak_lane(larger_bits(larger_bits(w[3], w[2]), larger_bits(w[1], w[0])));
  if (peak < kTiny) peak = 0;
  if (!(peak == peak))  // NaN reaches the answer by `step`, and not the integers
    for (Lanes& x : w) x = Lanes{};
  const float inverse = peak > 0 ? 32767.0f / peak : 0.0f;
  Whole total{};
  for (int v = 0; v < kVectors; v++) {
    const Lanes rounded = (w[v] * inverse + kMagic) - kMagic;
    const Whole i = __builtin_convertvector(rounded, Whole);
    total = total + i;
    *reinterpret_cast<Bytes*>(high + 16 * v) = __builtin_convertvector((i >> 7) - 128, Bytes);
    *reinterpret_cast<Bytes*>(low + 16 * v) = __builtin_convertvector(i & 127, Bytes);
  }
  *sum = sum_lane(total);
  partial[0] = most;
  partial[1] = sum_lane((s[0] + s[2]) + (s[1] + s[3]));
  *step = peak / 32767.0f;
}

// A run of query vectors over one block; all of them see it through both planes or through one.
void attend_block(const CacheLayer& cache, const uint8_t* rec, int D, bool full, const Queries& q,
                  int first, int count, const int* visible, float* const* partial) {
  const int Dk = cache.Dk, Dv = cache.Dv, shift = full ? 1 : 16;
  float ks[kBlock], vs[kBlock];
  const uint16_t* half = scales(const_cast<uint8_t*>(rec), cache, 0);
  for (int t = 0; t < kBlock; t++) ks[t] = half_to_float(half[t]) / 16.0f;
  for (int t = 0; t < kBlock; t++) vs[t] = half_to_float(half[kBlock + t]) / 16.0f;
  int32_t dots[kMaxQuery * kBlock];
  for (int tile = 0; tile < kBlock / kRows; tile++) {
    const uint8_t* base = rec + tile * Dk * 8;
    dots16(base, full ? base + kBlock * Dk / 2 : nullptr, Dk, q.codes + first * Dk, Dk,
           q.sums + first, count, dots + tile * kRows, kBlock);
  }
  Weights w;
  for (int i = 0; i < count; i++) {
    softmax_block(dots + i * kBlock, q.scale[first + i], shift, ks, vs, visible[i], partial[i],
                  w.limbs + 2 * i * kBlock, w.limbs + (2 * i + 1) * kBlock, &w.sums[i], &w.step[i]);
  }
  std::memset(w.limbs + 2 * count * kBlock, 1, kBlock);
  for (int tile = 0; tile < Dv / kRows; tile++) {
    const uint8_t* base = rec + kBlock * Dk + tile * kBlock * 8;
    int32_t sums[(2 * kMaxQuery + 1) * kRows];
    dots16(base, full ? base + kBlock * Dv / 2 : nullptr, kBlock, w.limbs, kBlock, kNoSums,
           2 * count + 1, sums, kRows);
    const int32_t* ones = sums + 2 * count * kRows;
    const int width = D - tile * kRows < kRows ? D - tile * kRows : kRows;
    for (int i = 0; i < count; i++) {
      const Whole high = whole(sums + 2 * i * kRows), low = whole(sums + (2 * i + 1) * kRows);
      const Whole sum = 128 * (high + 128 * whole(ones)) + low - (full ? kOffset : 8) * w.sums[i];
      const Lanes value = __builtin_convertvector(shift * sum, Lanes) * w.step[i];
      std::memcpy(partial[i] + 2 + tile * kRows, &value, sizeof(float) * size_t(width));
    }
  }
}

void attention(const Geometry& g, const CacheLayer& cache, const AttentionPart& part) {
  const int D = g.head_dim, group = g.num_heads / g.num_kv_heads;
  fetch_record(cache, part.kv_head, part.block0);
  Queries q;
  q.count = part.rows * group;
  for (int i = 0; i < q.count; i++) {
    const int64_t row = part.row0 + i / group, head = part.kv_head * group + i % group;
    int8_t* codes = q.codes + i * cache.Dk;
    const float* x = part.q + (row * g.num_heads + head) * D;
    const Quantiser of = quantiser_of(x, D, 1.0f);
    Whole sum{};
    for (int d = 0; d < D; d += 16) {  // the next vector writes over what is behind this one
      const Whole whole = codes_at(x, d, D, 1.0f, of.inverse);
      *reinterpret_cast<Bytes*>(codes + d) = __builtin_convertvector(whole, Bytes);
      sum = sum + whole;
    }
    q.scale[i] = of.scale * g.softmax_scale;
    q.sums[i] = sum_lane(sum);
  }
  for (int block = part.block0; block < part.block1; block++) {
    const uint8_t* rec = record(cache, part.kv_head, block);
    if (block + 1 < part.block1) fetch_record(cache, part.kv_head, block + 1);
    int first = 0;
    while (first < q.count) {
      const bool full = int64_t(block) * kBlock >= part.full_from[part.row0 + first / group];
      int visible[kMaxQuery];
      float* partial[kMaxQuery];
      int count = 0;
      for (; first + count < q.count; count++) {
        const int row = part.row0 + (first + count) / group;
        if (full != (int64_t(block) * kBlock >= part.full_from[row])) break;
        const int64_t left = part.positions[row] + 1 - int64_t(block) * kBlock;
        visible[count] = int(left < 0 ? 0 : left > kBlock ? kBlock : left);
        partial[count] = part.partial + (first + count) * part.partial_stride +
                         int64_t(block - part.block0) * (2 + D);
      }
      attend_block(cache, rec, D, full, q, first, count, visible, partial);
      first += count;
    }
  }
}

// One query vector: its blocks into out [D], ascending.
void combine(const Geometry& g, const float* partial, int blocks, float* out) {
  const int D = g.head_dim;
  float most = -INFINITY, total = 0, sum[kMaxDim];
  for (int b = 0; b < blocks; b++) {
    const float m = partial[int64_t(b) * (2 + D)];
    most = m > most ? m : most;
  }
  for (int d = 0; d < D; d++) sum[d] = 0;
  for (int b = 0; b < blocks; b++) {
    const float* part = partial + int64_t(b) * (2 + D);
    const float c = exp_nonpositive(part[0] - most);
    for (int d = 0; d < D; d++) sum[d] = sum[d] + part[2 + d] * c;
    total = total + part[1] * c;
  }
  for (int d = 0; d < D; d++) out[d] = sum[d] / total;
}

const Isa* table(const char* name, int interleave) {
  static const Isa isa{name,     interleave,     linear,   quantise,  norm_quantise,
                       silu_mul, rotate_queries, write_kv, attention, combine,
                       argmax,   exp64,          gumbel,   checksum};
  return &isa;
}
