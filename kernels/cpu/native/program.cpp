#include "program.h"

#include <algorithm>
#include <cstring>

namespace edge {

namespace {

constexpr int64_t kChunkBytes = 64 << 10;  // of weights; smaller pieces gain nothing
constexpr int kRowsAChunk = 8;             // for ops that go row by row: whole interleaved blocks
constexpr int kAttentionRows = 4;          // of a long pass
constexpr int kBlocksAChunk = 4;           // of the cache, where attention splits it
constexpr int kBlocksCombined = 16;        // by one thread for all rows

int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }

}  // namespace

Program::Program(Model& model, const Op* ops, int count, const int32_t* widths, int registers)
    : model_(model), ops_(ops, ops + count), registers_(size_t(registers)) {
  for (int i = 0; i < registers; i++) registers_[size_t(i)] = {widths[i], false};
  for (const Op& op : ops_) {
    if (op.kind == kNormQuantise || op.kind == kQuantise) registers_[size_t(op.out)].quantised = true;
  }
  stages_.resize(ops_.size());
  for (int i = count - 2; i >= 0; i--) {
    const Op& next = ops_[size_t(i) + 1];
    stages_[size_t(i)] = stages_[size_t(i) + 1];
    if (next.kind != kLinear && next.kind != kHead) continue;
    const Linear& L = model.linears[size_t(next.weight)];
    const int64_t bytes = int64_t(ceil_div(L.N, kTile)) * L.Kp * (kTile / 2);
    stages_[size_t(i)] = {0, i + 1, L.base, next.w8 ? L.refine : nullptr, bytes};
  }
  model.scratch.resize(size_t(model.pool->threads()));
  if (model.buffers.size() < registers_.size()) model.buffers.resize(registers_.size());
}

int64_t Model::workspace_bytes() const {
  int64_t bytes = int64_t(partial.capacity()) * 4;
  for (const Buffer& b : buffers)
    bytes += int64_t(b.x.capacity() + b.scale.capacity() + b.sums.capacity()) * 4 +
             int64_t(b.codes.capacity());
  for (const auto& s : scratch) bytes += int64_t(s.capacity()) * 4;
  return bytes;
}

void Model::release_workspace() {
  for (Buffer& buffer : buffers) buffer = Buffer{};
  for (auto& own : scratch) std::vector<float>().swap(own);
  std::vector<float>().swap(partial);
}

void Program::grow(int rows, int blocks) {
  const Geometry& g = model_.geometry;
  const int G = g.group_size, I = model_.isa->interleave;
  auto at_least = [](auto& buffer, int64_t size) {
    if (int64_t(buffer.size()) >= size) return;
    buffer.reserve(size_t(size));  // exactly
    buffer.resize(size_t(size));
  };
  int64_t own = 0;  // attention of many rows keeps its blocks in a thread's own
  for (size_t i = 0; i < registers_.size(); i++) {
    const Register& r = registers_[i];
    Buffer& buffer = model_.buffers[i];
    if (!r.quantised) {
      at_least(buffer.x, int64_t(rows) * r.width);
      continue;
    }
    const int64_t groups = ceil_div(r.width, G);
    at_least(buffer.codes, ceil_div(rows, I) * I * groups * G);
    at_least(buffer.scale, rows);
    at_least(buffer.sums, rows * groups);
  }
  const int64_t one = int64_t(blocks) * (2 + g.head_dim);
  if (rows <= kFewRows)
    at_least(model_.partial, one * rows * g.num_heads);
  else
    own = one * kMaxQuery;
  for (auto& s : model_.scratch) at_least(s, own);
}

// Tiles of a linear that are cut into chunks; where outputs are multiplied, a tile of each half.
int Program::tiles_of(const Op& op) const {
  const int N = model_.linears[size_t(op.weight)].N;
  return op.gate_up < 0 ? ceil_div(N, kTile) : N / 2 / kTile;
}

// Chunks of some kChunkBytes, as many for every thread. Halves that do not start on a tile: one.
int Program::pieces_of(const Op& op) const {
  const Linear& L = model_.linears[size_t(op.weight)];
  if (op.gate_up >= 0 && L.N / 2 % kTile) return 1;
  const int64_t tile = int64_t(L.Kp) * (kTile / 2) * (op.w8 ? 2 : 1) * (op.gate_up < 0 ? 1 : 2);
  const int threads = model_.pool->threads();
  return std::min(tiles_of(op), ceil_div(tiles_of(op) * tile, kChunkBytes * threads) * threads);
}

Program::Tiles Program::tiles_of_chunk(const Op& op, int index, int chunks) const {
  const int64_t tiles = tiles_of(op);
  return {int(tiles * index / chunks), int(tiles * (index + 1) / chunks)};
}

int Program::attention_rows() const {
  const int fit = kMaxQuery / (model_.geometry.num_heads / model_.geometry.num_kv_heads);
  // a short pass in two halves, so that few heads occupy two threads
  const int most = batch_.M <= kFewRows ? (batch_.M + 1) / 2 : kAttentionRows;
  return std::max(1, std::min(fit, most));
}

int Program::chunks_of(const Op& op) const {
  const Geometry& g = model_.geometry;
  const int M = batch_.M;
  switch (op.kind) {
    case kLinear:
    case kHead: return pieces_of(op);
    case kRopeKv: return g.num_kv_heads * 2;
    case kAttention: {
      const int ranges = M <= kFewRows ? ceil_div(blocks_, kBlocksAChunk) : 1;
      return g.num_kv_heads * ceil_div(M, attention_rows()) * ranges;
    }
    case kCombine:  // one chunk costs no hand-over, as long as there is little to do
      return M > kFewRows ? 0 : blocks_ > kBlocksCombined ? M : 1;
    case kSelectRows: return 1;
    default:  // what follows SelectRows has its rows
      return ceil_div(op.a >= 0 && op.a == head_rows_ ? batch_.num_logits : M, kRowsAChunk);
  }
}

void Program::run(const Batch& batch, Cache& cache) {
  batch_ = batch;
  cache_ = &cache;
  int64_t last = 0;
  for (int i = 0; i < batch.M; i++) last = std::max(last, batch.positions[i]);
  blocks_ = int(last / kBlock) + 1;
  grow(batch.M, int(cache.bytes / cache.block_stride));
  head_rows_ = -1;
  for (size_t i = 0; i < ops_.size(); i++) {
    if (ops_[i].kind == kSelectRows) head_rows_ = ops_[i].out;
    const int chunks = batch.skip >> ops_[i].kind & 1 ? 0 : chunks_of(ops_[i]);
    stages_[i].chunks = chunks;
    if (ops_[i].kind == kHead) {
      head_left_.store(chunks);
      best_.resize(std::max(best_.size(), size_t(chunks) * size_t(batch.num_logits)));
    }
  }
  model_.pool->run(*this, stages_.data(), int(ops_.size()));
}

void Program::chunk(int number, int index, int thread) {
  const Op& op = ops_[size_t(number)];
  const int chunks = stages_[size_t(number)].chunks;
  switch (op.kind) {
    case kEmbed:
      for (int r = index * kRowsAChunk; r < std::min(batch_.M, (index + 1) * kRowsAChunk); r++)
        embed(op, r);
      return;
    case kLinear: return op.gate_up < 0 ? linear(op, index, chunks) : gated(op, index, chunks);
    case kHead: return head(op, index, chunks);
    case kRopeKv: return rope(op, index);
    case kAttention: return attention(op, index, thread);
    case kCombine:
      for (int r = index; r < batch_.M; r += chunks) combine(op, r);
      return;
    case kSelectRows: return select(op);
    default: return quantise(op, index);
  }
}

Activation Program::activation(int number, int rows) {
  Buffer& b = model_.buffers[size_t(number)];
  const int G = model_.geometry.group_size;
  const int groups = ceil_div(registers_[size_t(number)].width, G);
  const int interleave = rows == 1 ? 1 : model_.isa->interleave;
  return {b.codes.data(), b.scale.data(), b.sums.data(), groups * G, groups, interleave};
}

void Program::embed(const Op& op, int row) {
  const int H = model_.geometry.hidden_size;
  float* out = floats(op.out) + int64_t(row) * H;
  if (batch_.rows) {
    std::memcpy(out, batch_.rows + int64_t(row) * H, sizeof(float) * size_t(H));
    return;
  }
  const int64_t id = batch_.ids[row];
  const int8_t* codes = model_.embedding + id * H;
  const float scale = model_.embedding_scale[id];
  for (int i = 0; i < H; i++) out[i] = float(codes[i]) * scale;
}

void Program::select(const Op& op) {
  const int H = model_.geometry.hidden_size;
  const float* from = floats(op.a) + int64_t(batch_.M - batch_.num_logits) * H;
  std::memcpy(floats(op.out), from, sizeof(float) * size_t(H) * size_t(batch_.num_logits));
}

void Program::quantise(const Op& op, int index) {
  const bool head = op.a == head_rows_;
  const int rows = head ? batch_.num_logits : batch_.M;
  const int width = registers_[size_t(op.a)].width, G = model_.geometry.group_size;
  const Activation a = activation(op.out, rows);
  const Isa& isa = *model_.isa;
  for (int r = index * kRowsAChunk; r < std::min(rows, (index + 1) * kRowsAChunk); r++) {
    const float* x = floats(op.a) + int64_t(r) * width;
    if (op.kind == kNormQuantise)
      isa.norm_quantise(x, width, op.eps, r, G, a);
    else
      isa.quantise(x, width, r, G, a);
  }
}

void Program::linear(const Op& op, int index, int chunks) {
  const Linear& L = model_.linears[size_t(op.weight)];
  const Tiles tiles = tiles_of_chunk(op, index, chunks);
  const float* residual = op.residual < 0 ? nullptr : floats(op.residual);
  model_.isa->linear(L, op.w8, activation(op.a, batch_.M), batch_.M, tiles.first, tiles.last,
                     floats(op.out), L.N, residual);
}

// Tiles of the first half of the outputs and the same of the second, then their product. Halves that
// do not start on a tile are one chunk.
void Program::gated(const Op& op, int index, int chunks) {
  const Linear& L = model_.linears[size_t(op.weight)];
  const int F = L.N / 2, M = batch_.M;
  float *gate_up = floats(op.gate_up), *out = floats(op.out);
  const Activation a = activation(op.a, M);
  int first = 0, last = F;
  if (chunks > 1) {
    const Tiles tiles = tiles_of_chunk(op, index, chunks);
    for (int half : {0, F / kTile})
      model_.isa->linear(L, op.w8, a, M, half + tiles.first, half + tiles.last, gate_up, L.N,
                         nullptr);
    first = tiles.first * kTile, last = tiles.last * kTile;
  } else {
    model_.isa->linear(L, op.w8, a, M, 0, ceil_div(L.N, kTile), gate_up, L.N, nullptr);
  }
  for (int64_t r = 0; r < M; r++) {
    const float* row = gate_up + r * L.N + first;
    model_.isa->silu_mul(row, row + F, last - first, out + r * F + first);
  }
}

void Program::head(const Op& op, int index, int chunks) {
  const Linear& L = model_.linears[size_t(op.weight)];
  const Tiles tiles = tiles_of_chunk(op, index, chunks);
  const int rows = batch_.num_logits;
  model_.isa->linear(L, op.w8, activation(op.a, rows), rows, tiles.first, tiles.last,
                     batch_.logits, batch_.stride, nullptr);
  const int first = tiles.first * kTile;
  const int width = std::min(tiles.last * kTile, model_.geometry.num_tokens) - first;
  for (int r = 0; r < batch_.num_logits; r++) {
    Best& best = best_[size_t(index) * size_t(batch_.num_logits) + size_t(r)];
    best = {0, -1, true};
    if (width <= 0) continue;
    model_.isa->argmax(batch_.logits + r * batch_.stride + first, width, &best.value, &best.index,
                       &best.finite);
    best.index += first;
  }
  if (head_left_.fetch_sub(1) == 1) finish_head();
}

// The head is the last op of its program.
void Program::finish_head() {
  const int n = batch_.num_logits;
  const int chunks = stages_.back().chunks;
  *batch_.finite = 1;
  for (int r = 0; r < n; r++) {
    Best most = best_[size_t(r)];
    for (int c = 0; c < chunks; c++) {
      const Best& best = best_[size_t(c) * size_t(n) + size_t(r)];
      if (best.index < 0) continue;
      if (!best.finite) *batch_.finite = 0;
      if (best.value > most.value) most = best;
    }
    batch_.best[r] = most.index;
  }
}

// All rows of one kv head, since tokens share bytes of the cache: even chunks rotate its queries, odd
// ones write its keys and values.
void Program::rope(const Op& op, int index) {
  const Geometry& g = model_.geometry;
  const int64_t q_width = int64_t(g.num_heads) * g.head_dim;
  const int64_t width = q_width + 2 * int64_t(g.num_kv_heads) * g.head_dim;
  const CacheLayer layer = cache_->layer(op.layer);
  const int kv_head = index / 2;
  for (int r = 0; r < batch_.M; r++) {
    const float* qkv = floats(op.a) + r * width;
    if (index % 2)
      model_.isa->write_kv(g, qkv, model_.cos, model_.sin, op.k_norm, op.eps, kv_head,
                           batch_.positions[r], layer);
    else
      model_.isa->rotate_queries(g, qkv, model_.cos, model_.sin, op.q_norm, op.eps, kv_head,
                                 batch_.positions[r], floats(op.out) + r * q_width);
  }
}

void Program::attention(const Op& op, int index, int thread) {
  const Geometry& g = model_.geometry;
  const int group = g.num_heads / g.num_kv_heads, D = g.head_dim, M = batch_.M;
  const bool few = M <= kFewRows;
  const int each = attention_rows();
  const int ranges = few ? ceil_div(blocks_, kBlocksAChunk) : 1, row_parts = ceil_div(M, each);
  const int range = index % ranges, part = index / ranges % row_parts;
  AttentionPart a{};
  a.q = floats(op.a);
  a.positions = batch_.positions;
  a.full_from = batch_.full_from;
  a.kv_head = index / ranges / row_parts;
  a.row0 = part * each;
  a.rows = std::min(each, M - a.row0);
  const int64_t one = 2 + D;
  if (few) {
    a.block0 = range * kBlocksAChunk;
    a.block1 = std::min(blocks_, a.block0 + kBlocksAChunk);
    a.partial_stride = blocks_ * one;
    // query vectors of a row and kv head are neighbours: [kv head][row][query of the group]
    a.partial = model_.partial.data() + (int64_t(a.kv_head) * M + a.row0) * group * a.partial_stride +
                a.block0 * one;
    model_.isa->attention(g, cache_->layer(op.layer), a);
    return;
  }
  int64_t last = 0;
  for (int r = a.row0; r < a.row0 + a.rows; r++) last = std::max(last, batch_.positions[r]);
  a.block1 = int(last / kBlock) + 1;
  a.partial_stride = a.block1 * one;
  a.partial = model_.scratch[size_t(thread)].data();
  model_.isa->attention(g, cache_->layer(op.layer), a);
  for (int i = 0; i < a.rows * group; i++) {
    const int64_t row = a.row0 + i / group, head = a.kv_head * group + i % group;
    model_.isa->combine(g, a.partial + i * a.partial_stride, a.block1,
                        floats(op.out) + (row * g.num_heads + head) * D);
  }
}

void Program::combine(const Op& op, int row) {
  const Geometry& g = model_.geometry;
  const int group = g.num_heads / g.num_kv_heads;
  const int64_t stride = blocks_ * int64_t(2 + g.head_dim);
  for (int h = 0; h < g.num_heads; h++) {
    const int64_t vector = (int64_t(h / group) * batch_.M + row) * group + h % group;
    model_.isa->combine(g, model_.partial.data() + vector * stride, blocks_,
                        floats(op.out) + (int64_t(row) * g.num_heads + h) * g.head_dim);
  }
}

}  // namespace edge
