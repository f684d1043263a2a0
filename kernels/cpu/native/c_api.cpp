// The C interface that library.py calls through ctypes (which lets go of the interpreter's lock).
#include <malloc.h>

#include <algorithm>
#include <cstring>

#include "program.h"

using namespace edge;

namespace {

// nibble of canonical plane bytes: input k of a group sits in byte k mod G/2, low nibble first
void repack_tile(const uint8_t* plane, int rows, int64_t row_bytes, int G, uint8_t flip,
                 uint8_t pad, uint8_t* out) {
  const int half = G / 2;
  const int64_t groups = row_bytes / half;
  for (int64_t g = 0; g < groups; g++)
    for (int c = 0; c < half / 4; c++, out += 4 * kTile)
      for (int n = 0; n < kTile; n++) {
        if (n >= rows) {
          std::memset(out + 4 * n, pad, 4);
          continue;
        }
        uint32_t word;
        std::memcpy(&word, plane + n * row_bytes + g * half + 4 * c, 4);
        word ^= flip * 0x01010101u;
        std::memcpy(out + 4 * n, &word, 4);
      }
}

struct Repack : Steps {
  const uint8_t *base, *refine;
  const int16_t* mult;
  int N, Kp, G;
  uint8_t *out_base, *out_refine;
  int16_t* out_mult;
  static constexpr int kTiles = 16;

  void chunk(int, int index, int) override {
    const int tiles = (N + kTile - 1) / kTile;
    for (int t = index * kTiles; t < std::min(tiles, (index + 1) * kTiles); t++) {
      const int rows = std::min(kTile, N - t * kTile);
      const int64_t row_bytes = Kp / 2, from = int64_t(t) * kTile * row_bytes;
      repack_tile(base + from, rows, row_bytes, G, 0x88, 0x88, out_base + from);
      repack_tile(refine + from, rows, row_bytes, G, 0, 0x88, out_refine + from);
      const int groups = Kp / G;
      for (int g = 0; g < groups; g++)
        for (int n = 0; n < kTile; n++)
          out_mult[(int64_t(t) * groups + g) * kTile + n] =
              n < rows ? mult[(int64_t(t) * kTile + n) * groups + g] : int16_t(0);
    }
  }
};

struct Read : Steps {
  const Isa* isa;
  const uint8_t* data;
  int64_t bytes;
  std::atomic<uint64_t> sum{0};
  static constexpr int64_t kPiece = 64 << 10;

  void chunk(int, int index, int) override {
    const int64_t from = index * kPiece;
    sum += isa->checksum(data + from, std::min(kPiece, bytes - from));
  }
};

const Isa* find_isa(const char* name) {
  for (const Isa* (*get)() : {isa_avx512, isa_avx2, isa_dotprod, isa_portable}) {
    const Isa* isa = get();
    if (isa && !std::strcmp(isa->name, name)) return isa;
  }
  return nullptr;
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

struct EdgeLinear {  // mirrors library.LinearArgs
  const uint8_t *base, *refine;
  const int16_t* mult;
  const float *scale, *bias;
  int32_t N, K, Kp, G;
};

// a number for the functions, and sizes of the structs that library.py mirrors: an old library must
// not be taken for this one
int64_t edge_abi() {
  constexpr int64_t kFunctions = 2;
  return (((kFunctions * 1000 + int64_t(sizeof(Op))) * 1000 + int64_t(sizeof(Batch))) * 1000 +
          int64_t(sizeof(SampleArgs))) *
             1000 +
         int64_t(sizeof(EdgeLinear)) + int64_t(sizeof(Geometry));
}

// whether the library has this instruction set and this processor can run it
int edge_isa_available(const char* name) {
  const Isa* isa = find_isa(name);
  if (!isa) return 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!std::strcmp(name, "avx512_vnni"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  if (!std::strcmp(name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return std::strcmp(name, "dotprod") || dotprod_available();
}

Model* edge_model_new(const Geometry* geometry, const char* isa, int threads,
                      const int8_t* embedding, const float* embedding_scale, const float* cos,
                      const float* sin) {
  const Isa* found = find_isa(isa);
  if (!found) return nullptr;
  return new Model{*geometry, found,           std::make_unique<Pool>(threads), {}, embedding,
                   embedding_scale, cos, sin};
}

void edge_model_free(Model* model) { delete model; }

int edge_model_linear(Model* model, const EdgeLinear* l) {
  model->linears.push_back({l->base, l->refine, l->mult, l->scale, l->bias, l->N, l->K, l->Kp, l->G});
  return int(model->linears.size()) - 1;
}

void edge_repack(Model* model, const uint8_t* base, const uint8_t* refine, const int16_t* mult,
                 int N, int Kp, int G, uint8_t* out_base, uint8_t* out_refine, int16_t* out_mult) {
  Repack job;
  job.base = base, job.refine = refine, job.mult = mult;
  job.N = N, job.Kp = Kp, job.G = G;
  job.out_base = out_base, job.out_refine = out_refine, job.out_mult = out_mult;
  const int tiles = (N + kTile - 1) / kTile;
  const Stage stage{(tiles + Repack::kTiles - 1) / Repack::kTiles};
  model->pool->run(job, &stage, 1);
}

uint64_t edge_read(Model* model, const uint8_t* data, int64_t bytes) {
  Read job;
  job.isa = model->isa, job.data = data, job.bytes = bytes;
  const Stage stage{int32_t((bytes + Read::kPiece - 1) / Read::kPiece)};
  model->pool->run(job, &stage, 1);
  return job.sum.load();
}

Program* edge_program_new(Model* model, const Op* ops, int count, const int32_t* widths,
                          int registers) {
  return new Program(*model, ops, count, widths, registers);
}

void edge_program_free(Program* program) { delete program; }

void edge_release_workspace(Model* model) {
  model->release_workspace();
#ifdef __GLIBC__
  malloc_trim(0);  // what the vectors held goes back to the kernel
#endif
}

int64_t edge_workspace_bytes(const Model* model) { return model->workspace_bytes(); }

void edge_run(Program* program, const Batch* batch, Cache* cache) { program->run(*batch, *cache); }

}  // extern "C"

#pragma GCC visibility pop
