// Threads that run a step together: a list of ops, each cut into chunks that whoever is free takes.
//
// Invariants: a chunk is done exactly once; an op starts when all chunks of the one before are done;
// nobody waits for a thread that holds no chunk, so a thread that lost its core outside a chunk
// delays nothing. The caller's thread takes part. Waiting spins for some microseconds and then
// sleeps (futex).
//
// How: one word, the ticket, says which chunks are left: (step, op, taken from the end, taken from
// the start). A thread takes a chunk by counting it up, which fails if the ticket moved on
// meanwhile; so a straggler of an old step gets nothing. Whoever finishes the last chunk of an op
// moves the ticket to the next, after doing ops of one chunk itself. Every second thread takes from
// the end, so that the same thread meets the same rows in the next op and finds them in its cache.
//
// A thread that loses its core while it holds a chunk does delay the rest, by a slice of the
// scheduler each time. After such a stall the caller works alone for 2, 4, … 256 steps: on a machine
// with a busy neighbour that is faster than waiting (tools/LOG.md).
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace edge {

class Steps {  // what a pool runs
 public:
  virtual ~Steps() = default;
  virtual void chunk(int op, int index, int thread) = 0;
};

// One op of a step. planes, bytes of each: what op `next` will read, which threads that wait for this
// one fetch into their caches; next 0: nothing.
struct Stage {
  int32_t chunks = 0, next = 0;  // chunks: fewer than 2^18
  const uint8_t *first_plane = nullptr, *second_plane = nullptr;
  int64_t bytes = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  void run(Steps& steps, const Stage* stages, int ops);  // returns when all chunks are done
  int threads() const { return int(workers_.size()) + 1; }

 private:
  static constexpr int kAloneLeast = 2, kAloneMost = 256;
  // A straggler of an old step may still read them: atomics, and kept until the end. What it then
  // fetches is of no use and does no harm.
  struct Shared {
    std::atomic<int32_t> chunks, next;
    std::atomic<const uint8_t*> planes[2];
    std::atomic<int64_t> bytes;
  };
  using Stages = std::unique_ptr<Shared[]>;

  void work(uint64_t step, int thread);
  void worker(int thread);
  void finish(uint64_t step, int op, int thread);
  bool fetch(uint64_t step, int op, bool from_end);
  bool alone();
  template <class Ready>
  void wait(Ready ready, int spins);
  void wake();

  Steps* steps_ = nullptr;
  Stages stages_;
  std::vector<Stages> retired_;
  std::atomic<Shared*> current_{nullptr};
  int capacity_ = 0, ops_ = 0;
  int alone_left_ = 0, alone_next_ = kAloneLeast;
  bool stalled_ = false;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<uint32_t> event_{0};
  // what is fetched ahead, from the start and from the end: step and op in 32 bits, piece in 32
  alignas(64) std::atomic<uint64_t> ahead_[2]{};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> helpers_{true}, stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace edge
