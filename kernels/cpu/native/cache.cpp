// Storage of the nested cache, and its canonical planes (kernels/ops.py, Cache).
#include <sys/mman.h>
#include <unistd.h>

#include "program.h"

namespace edge {

namespace {

constexpr int64_t kHugePage = 2 << 20;

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Cache::Cache(const Geometry& g, int capacity)
    : Dk(int32_t(padded(g.head_dim, 8))), Dv(int32_t(padded(g.head_dim, kRows))) {
  layer_stride = g.num_kv_heads * record_bytes(Dk, Dv);
  block_stride = g.num_layers * layer_stride;
  bytes = padded(capacity, kBlock) / kBlock * block_stride;
  void* found = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
  if (found == MAP_FAILED) return;
  if (bytes >= kHugePage) madvise(found, size_t(bytes), MADV_HUGEPAGE);
  data = static_cast<uint8_t*>(found);
}

Cache::~Cache() {
  if (data) munmap(data, size_t(bytes));
}

void Cache::trim(int length) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t from = padded((int64_t(length) + kBlock - 1) / kBlock * block_stride, page);
  if (data && from < bytes) madvise(data + from, size_t(bytes - from), MADV_DONTNEED);
}

namespace {

// Where a nibble of a token lies in a record, K (kind 0) or V (kind 1).
struct Place {
  int64_t byte, plane;  // of the base plane; from there to the refinement
  int shift;
};

Place place_of(const CacheLayer& layer, int kind, int t, int d) {
  const int half = layer.Dk / 2, v = t % (kBlock / 2);
  if (kind == 0)
    return {(t / kRows) * (layer.Dk * 8) + (d % half / 4) * 64 + (t % kRows) * 4 + d % half % 4,
            int64_t(kBlock) / 2 * layer.Dk, d < half ? 0 : 4};
  return {int64_t(kBlock) * layer.Dk + (d / kRows) * (kBlock * 8) + (v / 4) * 64 +
              (d % kRows) * 4 + v % 4,
          int64_t(kBlock) / 2 * layer.Dv, t < kBlock / 2 ? 0 : 4};
}

struct Nibble {
  uint8_t* byte;
  int shift;

  int get() const { return (*byte >> shift) & 15; }
  void set(int value) { *byte = uint8_t((*byte & (0xf0 >> shift)) | (value << shift)); }
};

void copy(Nibble inside, Nibble canonical, int flip, bool store) {
  if (store)
    inside.set(canonical.get() ^ flip);
  else
    canonical.set(inside.get() ^ flip);
}

}  // namespace

}  // namespace edge

using namespace edge;

#pragma GCC visibility push(default)

extern "C" {

// nullptr: out of memory
Cache* edge_cache_new(const Model* model, int capacity) {
  auto cache = std::make_unique<Cache>(model->geometry, capacity);
  return cache->data ? cache.release() : nullptr;
}

void edge_cache_free(Cache* cache) { delete cache; }

void edge_cache_trim(Cache* cache, int length) { cache->trim(length); }

int64_t edge_cache_bytes(const Cache* cache) { return cache->bytes; }

// canonical planes of layers first to last: base, refine [layers][2][length][heads][D/2],
// scale [layers][2][length][heads]
void edge_cache_copy(const Model* model, Cache* cache, int first, int last, int length, int store,
                     uint8_t* base, uint8_t* refine, uint16_t* scale) {
  const Geometry& g = model->geometry;
  const int D = g.head_dim, half = D / 2;
  int64_t at = 0;  // vectors so far
  for (int l = first; l < last; l++)
    for (int kind = 0; kind < 2; kind++)
      for (int t = 0; t < length; t++)
        for (int h = 0; h < g.num_kv_heads; h++, at++) {
          const CacheLayer layer = cache->layer(l);
          uint8_t* rec = layer.data + (t / kBlock) * layer.block_stride +
                         h * record_bytes(layer.Dk, layer.Dv);
          for (int d = 0; d < D; d++) {
            const Place p = place_of(layer, kind, t % kBlock, d);
            const int64_t to = at * half + d % half;
            const int shift = d < half ? 0 : 4;
            copy({rec + p.byte, p.shift}, {base + to, shift}, 8, store);
            copy({rec + p.byte + p.plane, p.shift}, {refine + to, shift}, 0, store);
          }
          uint16_t* s = reinterpret_cast<uint16_t*>(rec + int64_t(kBlock) * (layer.Dk + layer.Dv)) +
                        kind * kBlock + t % kBlock;
          if (store)
            *s = scale[at];
          else
            scale[at] = *s;
        }
}

}  // extern "C"

#pragma GCC visibility pop
