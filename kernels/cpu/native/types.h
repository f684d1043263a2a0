// What the native CPU kernels share: plain structs, one table of functions per instruction set.
//
// Nothing here has code that the linker could take from a file compiled for a newer instruction set:
// only declarations and plain data. Formulas and bits: kernels/ops.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edge {

constexpr int kRows = 16;      // rows of a tile of the cache: one row a lane
constexpr int kHalves = 2;     // of a tile of a matrix, each of kRows rows
constexpr int kTile = 32;      // rows of a tile of a matrix
constexpr int kBlock = 64;     // cached tokens of a block
constexpr int kMaxDim = 512;   // head_dim at most
constexpr int kMaxGroup = 128;
constexpr int kFewRows = 8;    // up to here attention splits the cache instead of the rows
constexpr int kMaxQuery = 32;  // query vectors that one attention call takes

// A nested matrix. base, refine: [tiles][Kp/8][32 rows][4 bytes]; in a group of G inputs, byte i of
// chunk c holds input 4c+i in its low nibble and input G/2+4c+i in its high one, base as q4+8,
// refine as q_r+8. mult: [tiles][Kp/G][32]. scale, bias: padded to whole tiles; bias may be null.
struct Linear {
  const uint8_t* base;
  const uint8_t* refine;
  const int16_t* mult;
  const float* scale;
  const float* bias;
  int32_t N, K, Kp, G;
};

// Quantised rows: codes zero beyond K, scale [rows], sums of groups [rows][groups]. Codes come in
// blocks of `interleave` rows, [block][stride / 4][row][4]: with one row that is [rows][stride].
struct Activation {
  int8_t* codes;
  float* scale;
  int32_t* sums;
  int32_t stride, groups, interleave;
};

struct Geometry {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, num_tokens, rotate_kv;
  int32_t group_size;
  float softmax_scale;
};

// One layer's view of the nested cache. A record per (block of 64 tokens, layer, kv head), in that
// order, so that a growing context takes memory from the start: K base, K refine (tiles of 16 tokens
// over head_dim), V base, V refine (tiles of 16 dims over 64 tokens), fp16 scales of K and of V.
struct CacheLayer {
  uint8_t* data;
  int64_t block_stride;  // bytes between blocks
  int32_t Dk, Dv;        // head_dim padded to 8 and to 16
};

inline constexpr int64_t record_bytes(int Dk, int Dv) { return int64_t(kBlock) * (Dk + Dv + 4); }

// What one attention call does: rows row0..row0+rows of the pass, one kv head, some blocks.
struct AttentionPart {
  const float* q;            // [M][num_heads * D]
  const int64_t* positions;  // [M]
  const int64_t* full_from;  // [M]
  int32_t kv_head, row0, rows, block0, block1;
  float* partial;  // [query vector][blocks of the pass][2 + D]: block maximum, sum, output
  int64_t partial_stride;  // floats from one query vector to the next
};

struct Isa {
  const char* name;
  int interleave;  // of the activations of passes of more than one row
  // y[row][n] for the tiles tile0..tile1 of a matrix; residual (same shape as y) may be null
  void (*linear)(const Linear&, bool w8, const Activation&, int rows, int tile0, int tile1, float* y,
                 int64_t y_stride, const float* residual);
  void (*quantise)(const float* x, int n, int row, int G, const Activation&);
  void (*norm_quantise)(const float* x, int n, float eps, int row, int G, const Activation&);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  // the query heads of one kv head; its key and value into the cache
  void (*rotate_queries)(const Geometry&, const float* qkv, const float* cos, const float* sin,
                         const float* q_norm, float eps, int kv_head, int64_t position,
                         float* q_out);
  void (*write_kv)(const Geometry&, const float* qkv, const float* cos, const float* sin,
                   const float* k_norm, float eps, int kv_head, int64_t position,
                   const CacheLayer&);
  void (*attention)(const Geometry&, const CacheLayer&, const AttentionPart&);
  void (*combine)(const Geometry&, const float* partial, int blocks, float* out);
  // first maximum of n logits, and whether all are finite
  void (*argmax)(const float* x, int n, float* best, int32_t* index, bool* finite);
  // fp64, for sampling: exp of x <= 0 (out may be x), and the noise of tokens at a position
  void (*exp64)(const double* x, int n, double* out);
  void (*gumbel)(uint64_t seed, uint64_t position, const int32_t* ids, int n, double* out);
  uint64_t (*checksum)(const uint8_t* data, int64_t bytes);  // reads everything: bandwidth
};

// null where the library was built for another processor
const Isa* isa_portable();
const Isa* isa_avx2();
const Isa* isa_avx512();
const Isa* isa_dotprod();
bool dotprod_available();  // whether this processor has the instructions

}  // namespace edge
