// RoPE with the writing of the cache, and attention over caches whose dead slots hold garbage.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "scalar.h"

namespace check {

namespace {

using edge::kBlock;
using scalar::Floats;

constexpr int kNever = 0x7fffffff;
enum Kind { kKey, kValue };

// The nested cache of one layer as bytes.
struct Cache {
  int D, Dk, Dv, heads, blocks;
  std::vector<uint8_t> bytes;

  Cache(int D_, int heads_, int blocks_, Random& random)
      : D(D_), Dk((D_ + 7) / 8 * 8), Dv((D_ + 15) / 16 * 16), heads(heads_), blocks(blocks_) {
    bytes.resize(size_t(blocks * block_stride()));
    for (uint8_t& b : bytes) b = uint8_t(random.bits());
    const uint16_t strange[] = {0x7e00, 0x7c00, 0xffff, 0xbc00, 0x7bff};
    for (int h = 0; h < heads; h++)
      for (int t = 0; t < blocks * kBlock; t++)
        for (Kind kind : {kKey, kValue}) set_scale(h, kind, t, strange[random.between(0, 4)]);
  }
  int64_t record_bytes() const { return edge::record_bytes(Dk, Dv); }
  int64_t block_stride() const { return (heads + 1) * record_bytes(); }  // another layer's as well
  int64_t start(int head, int t) const {
    return t / kBlock * block_stride() + head * record_bytes();
  }
  void set_scale(int head, Kind kind, int t, uint16_t half) {
    const int64_t at = start(head, t) + kBlock * (Dk + Dv) + (kind * kBlock + t % kBlock) * 2;
    std::memcpy(&bytes[size_t(at)], &half, 2);
  }
  // the nibbles of base (plane 0) or refinement
  scalar::Place nibble(int head, Kind kind, int plane, int t, int d) const {
    scalar::Place p = kind == kKey ? scalar::place(edge::kRows, Dk, Dk, t % kBlock, d)
                                   : scalar::place(edge::kRows, kBlock, kBlock, d, t % kBlock);
    p.byte += start(head, t) + plane * kBlock / 2 * (kind == kKey ? Dk : Dv);
    if (kind == kValue) p.byte += kBlock * Dk;
    return p;
  }
  void set(int head, Kind kind, int plane, int t, int d, int nibble_value) {
    const scalar::Place p = nibble(head, kind, plane, t, d);
    uint8_t& b = bytes[size_t(p.byte)];
    b = uint8_t((b & (0xf0 >> p.shift)) | (nibble_value << p.shift));
  }
  void write(int head, Kind kind, int t, const scalar::Nested& x) {
    for (int d = 0; d < D; d++) {
      set(head, kind, 0, t, d, x.q4[size_t(d)] + 8);
      set(head, kind, 1, t, d, x.qr[size_t(d)] + 8);
    }
    set_scale(head, kind, t, x.scale);
  }
};

edge::Geometry geometry(int kv_heads, int group, int D, bool rotate_kv) {
  edge::Geometry g{};
  g.num_layers = 1, g.num_heads = kv_heads * group, g.num_kv_heads = kv_heads, g.head_dim = D;
  g.rotate_kv = rotate_kv;
  g.softmax_scale = 1.0f / std::sqrt(float(D));
  return g;
}

struct RopeCase {
  int D, group;
  bool rotate_kv, normed;
  float magnitude;
};

void rope(const edge::Isa& isa, const RopeCase& c, Random& random, Report& report) {
  const int kv_heads = 2, kv = 1, blocks = 2, D = c.D, half = D / 2;
  const edge::Geometry g = geometry(kv_heads, c.group, D, c.rotate_kv);
  Floats qkv_values = random.floats((g.num_heads + 2 * kv_heads) * D, c.magnitude);
  qkv_values[3] = -0.0f;
  const Input<float> qkv(qkv_values), cos(random.floats(blocks * kBlock * half));
  const Input<float> sin(random.floats(blocks * kBlock * half)), qn(random.floats(D)),
      kn(random.floats(D));
  const float *q_norm = c.normed ? qn.data() : nullptr, *k_norm = c.normed ? kn.data() : nullptr;
  const float eps = 1e-6f, scale = c.rotate_kv ? g.softmax_scale : 0.0f;
  Cache cache(D, kv_heads, blocks, random);
  for (int position : {0, 1, 31, 32, 63, 64, 79, 127}) {
    const float *cos_row = cos.data() + position * half, *sin_row = sin.data() + position * half;
    auto head = [&](int h) { return Floats(qkv.data() + h * D, qkv.data() + (h + 1) * D); };
    Output<uint8_t> got(cache.bytes.size());
    Output<float> q(size_t(g.num_heads * D));
    std::memcpy(got.data(), cache.bytes.data(), cache.bytes.size());
    isa.rotate_queries(g, qkv.data(), cos.data(), sin.data(), q_norm, eps, kv, position, q.data());
    isa.write_kv(g, qkv.data(), cos.data(), sin.data(), k_norm, eps, kv, position,
                 {got.data(), cache.block_stride(), cache.Dk, cache.Dv});
    const std::string where = "D " + std::to_string(D) + " position " + std::to_string(position);
    for (int h = 0; h < g.num_heads; h++) {
      const Floats want = scalar::rotate(head(h), q_norm, eps, cos_row, sin_row, scale);
      for (int d = 0; d < D; d++) {
        const float value = q[size_t(h * D + d)];
        if (h / c.group == kv)
          report.same_float(value, want[size_t(d)], where, " q");
        else
          report.holds(q.untouched(value), where, " writes q of another kv head");
      }
    }
    const Floats key = scalar::rotate(head(g.num_heads + kv), k_norm, eps, cos_row, sin_row, scale);
    cache.write(kv, kKey, position, scalar::nest(key));
    cache.write(kv, kValue, position, scalar::nest(head(g.num_heads + kv_heads + kv)));
    for (Kind kind : {kKey, kValue})  // dims that only fill up may hold anything
      for (int plane : {0, 1})
        for (int d = D; d < (kind == kKey ? cache.Dk : cache.Dv); d++) {
          const scalar::Place p = cache.nibble(kv, kind, plane, position, d);
          cache.set(kv, kind, plane, position, d, got[size_t(p.byte)] >> p.shift & 15);
        }
    for (size_t i = 0; i < cache.bytes.size(); i++)
      report.same(got[i], cache.bytes[i], where, " cache");
    report.holds(got.intact() && q.intact(), where, " writes outside");
    report.next_case();
  }
}

enum Content { kRandom, kFlat, kPeaked, kExtreme, kZeroValues, kZeroQueries, kNumContents };

uint16_t any_scale(Random& random, Content content) {
  if (content == kFlat || content == kExtreme) return 0x2c00;
  const uint16_t special[] = {0, 1, 0x03ff, 0x0400, 0x3c00};
  if (random.between(0, 15) == 0) return special[random.between(0, 4)];
  const int top = content == kPeaked ? 0x4c00 : 0x3000;
  return uint16_t(random.between(0x1800, top));
}

// tokens up to `live`, as the cache holds them and as numbers
struct Tokens {
  std::vector<scalar::Nested> k, v;
};

scalar::Nested token(Random& random, Content content, int D, bool value) {
  scalar::Nested x{{}, {}, any_scale(random, content)};
  for (int d = 0; d < D; d++) {
    int q4 = random.between(-8, 7), qr = random.between(q4 == -8 ? 0 : -8, 7);
    if (content == kExtreme) q4 = value && d % 2 ? -8 : 7, qr = q4 == 7 ? 7 : 0;
    if (content == kFlat && !value) q4 = 1, qr = 0;
    if (content == kZeroValues && value) q4 = qr = 0, x.scale = 0;
    x.q4.push_back(q4), x.qr.push_back(qr);
  }
  return x;
}

scalar::Block block_of(const Tokens& tokens, int block, int position, int full_from) {
  const int first = block * kBlock;
  scalar::Block b{{}, {}, {}, {}, std::clamp(position + 1 - first, 0, kBlock)};
  for (int t = first; t < first + b.visible; t++) {
    auto codes = [&](const scalar::Nested& x) {
      std::vector<int> out;
      for (size_t d = 0; d < x.q4.size(); d++)
        out.push_back(16 * x.q4[d] + (t >= full_from ? x.qr[d] : 0));
      return out;
    };
    b.k.push_back(codes(tokens.k[size_t(t)])), b.v.push_back(codes(tokens.v[size_t(t)]));
    b.ks.push_back(scalar::half_value(tokens.k[size_t(t)].scale));
    b.vs.push_back(scalar::half_value(tokens.v[size_t(t)].scale));
  }
  return b;
}

struct AttentionCase {
  int D, group, rows;
  Content content;
  int policy;  // 0: both planes, 1: base only, 2: mixed
};

constexpr int kBlocks = 4, kEdges[] = {63, 64, 0, 127, 128, 65, 191, 192, 1, 62, 255, 200};

void check_row(const edge::Isa& isa, const edge::Geometry& g, const float* partial, const Floats& q,
               const Tokens& tokens, int position, int full_from, const std::string& where,
               Report& report) {
  const size_t D = q.size();
  std::vector<scalar::Partial> want;
  for (int b = 0; b < kBlocks; b++) {
    want.push_back(scalar::attend(q, block_of(tokens, b, position, full_from), g.softmax_scale));
    const float* got = partial + size_t(b) * (2 + D);
    report.same_float(got[0], want.back().most, where, " maximum");
    report.same_float(got[1], want.back().sum, where, " sum");
    for (size_t d = 0; d < D; d++) report.same_float(got[2 + d], want.back().out[d], where, " out");
  }
  const Floats whole = scalar::combine(want);
  Output<float> out(D);
  isa.combine(g, partial, kBlocks, out.data());
  for (size_t d = 0; d < D; d++) report.same_float(out[d], whole[d], where, " combined");
  report.holds(out.intact(), where, " combine writes outside");
}

void attend(const edge::Isa& isa, const AttentionCase& c, Random& random, Report& report) {
  const int kv_heads = 2, kv = 1, M = c.rows, D = c.D;
  const edge::Geometry g = geometry(kv_heads, c.group, D, false);
  std::vector<int64_t> positions, full_from;
  for (int m = 0; m < M; m++) {
    positions.push_back(M == 1 ? random.between(0, 255) : kEdges[(m + D) % 12]);
    const int mixed[] = {0, kNever, 64, 128, int(positions.back()) / kBlock * kBlock};
    full_from.push_back(c.policy == 2 ? mixed[random.between(0, 4)] : c.policy ? kNever : 0);
  }
  Cache cache(D, kv_heads, kBlocks, random);
  Tokens tokens;
  for (int t = 0; t <= *std::max_element(positions.begin(), positions.end()); t++) {
    tokens.k.push_back(token(random, c.content, D, false));
    tokens.v.push_back(token(random, c.content, D, true));
    cache.write(kv, kKey, t, tokens.k.back()), cache.write(kv, kValue, t, tokens.v.back());
  }
  const Floats q = c.content == kExtreme
                       ? Floats(size_t(M * g.num_heads * D), 2.5f)
                       : random.floats(M * g.num_heads * D, c.content == kZeroQueries ? 0 : 3);
  const Input<float> queries(q);
  const Input<uint8_t> bytes(cache.bytes);
  const Input<int64_t> at(positions), from(full_from);
  const int64_t one = 2 + D, stride = kBlocks * one;
  Output<float> partial(size_t(M * c.group * stride));
  const int each = edge::kMaxQuery / c.group;
  for (int row0 = 0; row0 < M; row0 += each)
    for (int block : {2, 0}) {  // two calls over the cache, as two threads would make
      edge::AttentionPart part{};
      part.q = queries.data(), part.positions = at.data(), part.full_from = from.data();
      part.kv_head = kv, part.row0 = row0, part.rows = std::min(each, M - row0);
      part.block0 = block, part.block1 = block + 2;
      part.partial = partial.data() + row0 * c.group * stride + block * one;
      part.partial_stride = stride;
      isa.attention(g, {bytes.data(), cache.block_stride(), cache.Dk, cache.Dv}, part);
    }
  const std::string where = "D " + std::to_string(D) + " group " + std::to_string(c.group) +
                            " rows " + std::to_string(M) + " content " + std::to_string(c.content);
  for (int i = 0; i < M * c.group; i++) {
    const int m = i / c.group, head = kv * c.group + i % c.group;
    const auto start = q.begin() + (m * g.num_heads + head) * D;
    check_row(isa, g, partial.data() + i * stride, Floats(start, start + D), tokens,
              int(positions[size_t(m)]), int(full_from[size_t(m)]), where, report);
  }
  report.holds(partial.intact(), where, " writes outside");
  report.next_case();
}

// a scale that is not a number, of a token that a row sees, must not vanish
void not_a_number(const edge::Isa& isa, Kind kind, Random& random, Report& report) {
  const int D = 64;
  const edge::Geometry g = geometry(1, 1, D, false);
  Cache cache(D, 1, 1, random);
  for (int t = 0; t < kBlock; t++)
    for (Kind k : {kKey, kValue}) cache.write(0, k, t, token(random, kRandom, D, k == kValue));
  cache.set_scale(0, kind, 5, 0x7e00);
  const Input<float> q(random.floats(D));
  const int64_t position = 10, full_from = 0;
  Output<float> partial(size_t(2 + D)), out(static_cast<size_t>(D));
  isa.attention(g, {cache.bytes.data(), cache.block_stride(), cache.Dk, cache.Dv},
                {q.data(), &position, &full_from, 0, 0, 1, 0, 1, partial.data(), 2 + D});
  isa.combine(g, partial.data(), 1, out.data());
  for (size_t d = 0; d < size_t(D); d++)
    report.holds(std::isnan(out[d]), kind == kKey ? "a K scale is NaN" : "a V scale is NaN");
  report.next_case();
}

}  // namespace

// NaN in one token's key and value changes no nibble of another token.
void rope_not_a_number(const edge::Isa& isa, int D, Random& random, Report& report) {
  const edge::Geometry g = geometry(1, 1, D, false);
  const Input<float> qkv(Floats(size_t(3 * D), NAN)), ones(Floats(size_t(kBlock * D / 2), 1.0f));
  const Cache cache(D, 1, 1, random);
  for (int position : {0, 4, 33, 63}) {
    Output<uint8_t> got(cache.bytes.size());
    std::memcpy(got.data(), cache.bytes.data(), cache.bytes.size());
    isa.write_kv(g, qkv.data(), ones.data(), ones.data(), nullptr, 1e-6f, 0, position,
                 {got.data(), cache.block_stride(), cache.Dk, cache.Dv});
    bool others = got.intact();
    for (Kind kind : {kKey, kValue})
      for (int plane : {0, 1})
        for (int t = 0; t < kBlock; t++)
          for (int d = 0; t != position && d < D; d++) {
            const scalar::Place at = cache.nibble(0, kind, plane, t, d);
            const int before = cache.bytes[size_t(at.byte)], after = got[size_t(at.byte)];
            others = others && (before >> at.shift & 15) == (after >> at.shift & 15);
          }
    report.holds(others, "NaN at position " + std::to_string(position), " changes another token");
    report.next_case();
  }
}

void rope_cases(const edge::Isa& isa, Report& report) {
  Random random(4);
  for (int D : {16, 24, 64, 80, 128})
    for (bool normed : {false, true})
      for (float magnitude : {1.0f, 1e-6f, 1e6f, 0.0f, 1e-30f})
        for (bool rotate_kv : {false, true})
          if (!rotate_kv || (D & (D - 1)) == 0)
            rope(isa, {D, D == 64 ? 3 : 1, rotate_kv, normed, magnitude}, random, report);
  for (int D : {16, 24, 64}) rope_not_a_number(isa, D, random, report);
}

void attention_cases(const edge::Isa& isa, Report& report) {
  Random random(5);
  for (int D : {16, 24, 64, 80, 128})
    for (int group : {1, 3, 7})
      for (int rows = 1; rows <= 9; rows++) {
        const int turn = D / 8 + group + rows;
        attend(isa, {D, group, rows, kRandom, rows % 3}, random, report);
        attend(isa, {D, group, 1 + rows % 3, Content(turn % kNumContents), turn % 2 + rows % 2},
               random, report);
      }
  for (Kind kind : {kKey, kValue}) not_a_number(isa, kind, random, report);
}

}  // namespace check
