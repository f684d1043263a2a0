#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>

namespace edge {

namespace {

constexpr int kSpinsInside = 4000;    // of a step: some 40 us, longer than the longest chunk
constexpr int kSpinsBetween = 20000;  // steps: some 200 us, longer than the host's part of one
// A wait is a stall if it takes longer than this and than some of the caller's own chunks.
constexpr std::chrono::microseconds kStall{400};
constexpr int kStallChunks = 4;

// The ticket: step in 16 bits, op in 12, chunks taken from the end in 18, from the start in 18.
// Op kEnd: nothing is left of the step.
constexpr int kBackShift = 18, kOpShift = 36, kOpBits = 12, kStepShift = kOpShift + kOpBits;
constexpr uint64_t kCountMask = 0x3ffff, kEnd = 0xfff, kStepMask = 0xffff;

// What a waiting thread fetches of each plane at a time, and its side in all.
constexpr int64_t kPieceBytes = 512, kAheadBytes = 256 << 10;

constexpr std::memory_order kRelaxed = std::memory_order_relaxed;

uint64_t ticket_of(uint64_t step, uint64_t op) { return step << kStepShift | op << kOpShift; }
uint64_t step_of(uint64_t ticket) { return ticket >> kStepShift; }
uint64_t op_of(uint64_t ticket) { return ticket >> kOpShift & kEnd; }

[[noreturn]] void fail(const char* what, int count) {
  std::fprintf(stderr, "bitnest-edge: %d %s are more than a step can count\n", count, what);
  std::abort();
}

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

void Pool::run(Steps& steps, const Stage* stages, int ops) {
  if (uint64_t(ops) >= kEnd) fail("ops", ops);
  if (ops > capacity_) {
    if (stages_) retired_.push_back(std::move(stages_));
    stages_ = std::make_unique<Shared[]>(size_t(ops));
    capacity_ = ops;
    current_.store(stages_.get());
  }
  for (int i = 0; i < ops; i++) {
    Shared& shared = stages_[size_t(i)];
    if (uint64_t(stages[i].chunks) > kCountMask) fail("chunks", stages[i].chunks);
    shared.chunks.store(stages[i].chunks, kRelaxed);
    shared.next.store(stages[i].next, kRelaxed);
    shared.planes[0].store(stages[i].first_plane, kRelaxed);
    shared.planes[1].store(stages[i].second_plane, kRelaxed);
    shared.bytes.store(stages[i].bytes, kRelaxed);
  }
  steps_ = &steps;
  ops_ = ops;
  const bool helpers = !workers_.empty() && !alone();
  helpers_.store(helpers);
  const uint64_t step = (step_of(ticket_.load()) + 1) & kStepMask;
  finish(step, -1, 0);
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

// Do the ops of one chunk that follow, then move the ticket to the next of several.
void Pool::finish(uint64_t step, int op, int thread) {
  for (op++; op < ops_; op++) {
    const int32_t total = stages_[size_t(op)].chunks.load(kRelaxed);
    if (total > 1) break;
    if (total == 1) steps_->chunk(op, 0, thread);
  }
  done_.store(0);
  ticket_.store(ticket_of(step, op < ops_ ? uint64_t(op) : kEnd));
  if (helpers_.load()) wake();
}

// Fetch a piece of the planes that later ops read: of each the half that this thread's side takes.
bool Pool::fetch(uint64_t step, int op, bool from_end) {
  const Shared* stages = current_.load();
  int next = stages[op].next.load(kRelaxed);
  const uint64_t wanted = step << kOpBits | uint64_t(next);
  std::atomic<uint64_t>& ahead = ahead_[from_end];
  uint64_t seen = ahead.load(kRelaxed);
  if (seen >> 32 != wanted) ahead.compare_exchange_strong(seen, wanted << 32);
  int64_t at = int64_t(uint32_t(ahead.fetch_add(1, kRelaxed))) * kPieceBytes;
  if (at >= kAheadBytes) return false;
  for (; next; op = next, next = stages[op].next.load(kRelaxed)) {
    const int64_t bytes = stages[op].bytes.load(kRelaxed), half = bytes / 2;
    if (at >= half) {
      at -= half;
      continue;
    }
    const int64_t start = from_end ? bytes - at - kPieceBytes : at;
    for (const auto& plane : stages[op].planes) {
      const uint8_t* data = plane.load(kRelaxed);
      for (int64_t i = start; data && i < start + kPieceBytes; i += 64)
        __builtin_prefetch(data + i, 0, 2);
    }
    return true;
  }
  return false;
}

void Pool::work(uint64_t step, int thread) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point mark = Clock::now();
  Clock::duration own{};  // the caller's last chunk
  while (true) {
    uint64_t ticket = ticket_.load();
    const uint64_t op = op_of(ticket);
    if (step_of(ticket) != step || op == kEnd) return;
    const int32_t total = current_.load()[op].chunks.load(kRelaxed);
    const bool from_end = thread % 2;
    const int32_t front = int32_t(ticket & kCountMask);
    const int32_t back = int32_t(ticket >> kBackShift & kCountMask);
    if (front + back < total) {
      const uint64_t taken = uint64_t(1) << (from_end ? kBackShift : 0);
      if (!ticket_.compare_exchange_weak(ticket, ticket + taken)) continue;
      steps_->chunk(int(op), from_end ? total - 1 - back : front, thread);
      if (done_.fetch_add(1) + 1 == total) finish(step, int(op), thread);
      if (thread) continue;
      const Clock::time_point now = Clock::now();
      own = now - mark;
      mark = now;
      continue;
    }
    auto moved = [&] { return ticket_.load() >> kOpShift != ticket >> kOpShift; };
    while (!moved() && fetch(step, int(op), from_end)) {
    }
    wait(moved, kSpinsInside);
    if (thread) continue;
    const Clock::time_point now = Clock::now();
    if (now - mark > kStall && now - mark > kStallChunks * own) stalled_ = true;
    mark = now;
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
