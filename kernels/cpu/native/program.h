// A program as the host hands it over, its buffers, and how its ops are cut into chunks.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"
#include "types.h"

namespace edge {

enum OpKind : int32_t {
  kEmbed,
  kNormQuantise,
  kQuantise,
  kLinear,
  kRopeKv,
  kAttention,
  kCombine,
  kSelectRows,
  kHead,
};

// Mirrors library.Op. a, out, residual, gate_up: numbers of registers; -1: none. A linear with
// gate_up leaves its outputs there, and silu(first half) * second half in out.
struct Op {
  int32_t kind, a, out, residual, gate_up, weight, layer, w8;
  float eps;
  const float *q_norm, *k_norm;
};

struct Batch {  // mirrors library.Batch
  const int64_t* ids;
  const float* rows;
  const int64_t* positions;
  const int64_t* full_from;
  int32_t M, num_logits;
  int32_t skip;     // bit k: ops of kind k do nothing (benchmarks)
  float* logits;    // [num_logits][stride]
  int64_t stride;
  int32_t* best;    // [num_logits]
  int32_t* finite;  // 1, or 0 if a logit is NaN or infinite
};

struct SampleArgs {  // mirrors library.SampleArgs
  const float* logits;
  const int64_t *prompt, *answer;
  const int32_t* allowed;  // rising, or null
  int64_t prompt_length, answer_length;
  int32_t num_tokens, num_allowed, top_k;
  double temperature, top_p, min_p, repetition_penalty, presence_penalty;
  uint64_t seed, position;
};

struct Cache {
  Cache(const Geometry& geometry, int capacity);  // data is null: out of memory
  ~Cache();
  Cache(const Cache&) = delete;
  void trim(int length);  // gives pages behind the first tokens back
  CacheLayer layer(int index) const {
    return {data + index * layer_stride, block_stride, Dk, Dv};
  }

  uint8_t* data = nullptr;
  int64_t bytes = 0, layer_stride = 0, block_stride = 0;
  int32_t Dk = 0, Dv = 0;
};

// Where a register lives. All programs of a model share them: nothing outlives a pass.
struct Buffer {
  std::vector<float> x;
  std::vector<int8_t> codes;
  std::vector<float> scale;
  std::vector<int32_t> sums;
};

struct Model {
  Geometry geometry;
  const Isa* isa;
  std::unique_ptr<Pool> pool;
  std::vector<Linear> linears;
  const int8_t* embedding;
  const float* embedding_scale;
  const float *cos, *sin;
  std::vector<Buffer> buffers{};
  std::vector<float> partial{};                // attention of few rows: [row][head][block][2 + D]
  std::vector<std::vector<float>> scratch{};   // a thread's own
  int64_t workspace_bytes() const;
  void release_workspace();  // between passes; the next one makes what it needs
};

class Program : public Steps {
 public:
  Program(Model& model, const Op* ops, int count, const int32_t* widths, int registers);
  void run(const Batch& batch, Cache& cache);
  void chunk(int op, int index, int thread) override;

 private:
  struct Register {
    int32_t width;
    bool quantised;
  };
  struct Tiles {
    int first, last;
  };
  struct Best {
    float value;
    int32_t index;
    bool finite;
  };

  void grow(int rows, int blocks);
  int chunks_of(const Op& op) const;
  int attention_rows() const;  // of a chunk
  int tiles_of(const Op& op) const;
  int pieces_of(const Op& op) const;
  Tiles tiles_of_chunk(const Op& op, int index, int chunks) const;
  Activation activation(int number, int rows);
  float* floats(int number) { return model_.buffers[size_t(number)].x.data(); }
  void embed(const Op& op, int row);
  void select(const Op& op);
  void linear(const Op& op, int index, int chunks);
  void gated(const Op& op, int index, int chunks);
  void head(const Op& op, int index, int chunks);
  void finish_head();
  void rope(const Op& op, int index);
  void attention(const Op& op, int index, int thread);
  void combine(const Op& op, int row);
  void quantise(const Op& op, int index);

  Model& model_;
  std::vector<Op> ops_;
  std::vector<Register> registers_;
  std::vector<Stage> stages_;
  std::vector<Best> best_;                     // [chunk of the head][row]
  std::atomic<int> head_left_{0};
  Batch batch_{};
  Cache* cache_ = nullptr;
  int blocks_ = 0, head_rows_ = 0;
};

}  // namespace edge
