// Threads that run a step together: a list of ops, each cut into chunks that whoever is free takes.
//
// Invariants: a chunk is done exactly once; an op starts when all chunks of the one before are done;
// nobody waits for a thread that holds no chunk, so a thread that lost its core outside a chunk
// delays nothing. The caller's thread takes part. Waiting spins for some microseconds and then
// sleeps (futex).
//
// How: one word, the ticket, says which chunk is next: (step, op, chunk). A thread takes a chunk by
// counting it up, which fails if the ticket moved on meanwhile; so a straggler of an old step gets
// nothing. Whoever finishes the last chunk of an op moves the ticket to the next.
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

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  // chunks: how many of each op; returns when all are done
  void run(Steps& steps, const int32_t* chunks, int ops);
  int threads() const { return int(workers_.size()) + 1; }

 private:
  static constexpr int kAloneLeast = 2, kAloneMost = 256;
  using Totals = std::unique_ptr<std::atomic<int32_t>[]>;

  void work(uint64_t step, int thread);
  void worker(int thread);
  void finish(uint64_t step, int op);
  bool alone();
  template <class Ready>
  void wait(Ready ready, int spins);
  void wake();

  Steps* steps_ = nullptr;
  Totals totals_;  // chunks of each op
  std::vector<Totals> retired_;  // a straggler may still look at them
  std::atomic<std::atomic<int32_t>*> current_{nullptr};
  int capacity_ = 0, ops_ = 0;
  int alone_left_ = 0, alone_next_ = kAloneLeast;
  bool stalled_ = false;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<uint32_t> event_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> helpers_{true}, stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace edge
