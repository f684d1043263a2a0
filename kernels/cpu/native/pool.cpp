#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace edge {

namespace {

constexpr int kSpinsInside = 4000;    // of a step: some 40 us, longer than the longest chunk
constexpr int kSpinsBetween = 20000;  // steps: some 200 us, longer than the host's part of one
// A wait is a stall if it takes longer than this and than some of the caller's own chunks.
constexpr std::chrono::microseconds kStall{400};
constexpr int kStallChunks = 4;

// The ticket: step in 24 bits, op in 16, chunk in 24. Op kEnd: nothing is left of the step.
constexpr int kOpShift = 24, kStepShift = 40;
constexpr uint64_t kChunkMask = (uint64_t(1) << kOpShift) - 1, kEnd = 0xffff;
constexpr uint64_t kStepMask = (uint64_t(1) << 24) - 1;

uint64_t ticket_of(uint64_t step, uint64_t op) { return step << kStepShift | op << kOpShift; }
uint64_t step_of(uint64_t ticket) { return ticket >> kStepShift; }
uint64_t op_of(uint64_t ticket) { return ticket >> kOpShift & kEnd; }

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr,
          0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { worker(i); });
}

Pool::~Pool() {
  stop_.store(true);
  event_.fetch_add(1);
  futex_wake_all(&event_);
  for (auto& thread : workers_) thread.join();
}

template <class Ready>
void Pool::wait(Ready ready, int spins) {
  for (int i = 0; i < spins; i++) {
    if (ready()) return;
    relax();
  }
  while (true) {
    const uint32_t seen = event_.load();
    sleepers_.fetch_add(1);
    if (!ready()) futex_wait(&event_, seen);
    sleepers_.fetch_sub(1);
    if (ready()) return;
  }
}

void Pool::wake() {
  if (sleepers_.load() == 0) return;
  event_.fetch_add(1);
  futex_wake_all(&event_);
}

void Pool::run(Steps& steps, const int32_t* chunks, int ops) {
  if (ops > capacity_) {
    if (totals_) retired_.push_back(std::move(totals_));
    totals_ = std::make_unique<std::atomic<int32_t>[]>(size_t(ops));
    capacity_ = ops;
    current_.store(totals_.get());
  }
  for (int i = 0; i < ops; i++) totals_[size_t(i)].store(chunks[i], std::memory_order_relaxed);
  steps_ = &steps;
  ops_ = ops;
  const bool helpers = !workers_.empty() && !alone();
  helpers_.store(helpers);
  const uint64_t step = (step_of(ticket_.load()) + 1) & kStepMask;
  finish(step, -1);
  work(step, 0);
}

// Whether this step is one of those that the caller does without the others.
bool Pool::alone() {
  if (stalled_) {
    stalled_ = false;
    alone_left_ = alone_next_;
    alone_next_ = std::min(2 * alone_next_, kAloneMost);
  } else if (alone_left_ == 0 && alone_next_ > kAloneLeast) {
    alone_next_--;  // a calm step
  }
  if (alone_left_ == 0) return false;
  alone_left_--;
  return true;
}

// Move the ticket to the next op that has chunks.
void Pool::finish(uint64_t step, int op) {
  do op++;
  while (op < ops_ && totals_[size_t(op)].load(std::memory_order_relaxed) == 0);
  done_.store(0);
  ticket_.store(ticket_of(step, op < ops_ ? uint64_t(op) : kEnd));
  if (helpers_.load()) wake();
}

void Pool::work(uint64_t step, int thread) {
  using Clock = std::chrono::steady_clock;
  Clock::duration own{};  // the last chunk here
  while (true) {
    uint64_t ticket = ticket_.load();
    const uint64_t op = op_of(ticket);
    if (step_of(ticket) != step || op == kEnd) return;
    const int32_t total = current_.load()[op].load(std::memory_order_relaxed);
    if (int32_t(ticket & kChunkMask) < total) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
      const auto since = Clock::now();
      steps_->chunk(int(op), int(ticket & kChunkMask), thread);
      own = Clock::now() - since;
      if (done_.fetch_add(1) + 1 == total) finish(step, int(op));
      continue;
    }
    auto moved = [&] { return ticket_.load() >> kOpShift != ticket >> kOpShift; };
    const auto since = Clock::now();
    wait(moved, kSpinsInside);
    const Clock::duration waited = Clock::now() - since;
    if (thread == 0 && waited > kStall && waited > kStallChunks * own) stalled_ = true;
  }
}

void Pool::worker(int thread) {
  uint64_t seen = 0;
  while (true) {
    wait([&] { return step_of(ticket_.load()) != seen || stop_.load(); }, kSpinsBetween);
    if (stop_.load()) return;
    seen = step_of(ticket_.load());
    if (helpers_.load()) work(seen, thread);
  }
}

}  // namespace edge
