// Choosing a token from one row of logits: kernels/sampling.py, step by step, to the bit.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "program.h"

using namespace edge;

namespace {

struct Candidates {
  std::vector<int32_t> ids;
  std::vector<double> scores;
};

// by falling score, then rising id (the ids come in rising order): a stable radix sort
void sort_falling(Candidates& c) {
  const size_t n = c.ids.size();
  std::vector<uint64_t> keys(n), other(n);
  std::vector<int32_t> order(n), next(n);
  for (size_t i = 0; i < n; i++) {
    const double score = c.scores[i] + 0.0;  // one zero
    uint64_t u;
    std::memcpy(&u, &score, 8);
    keys[i] = u >> 63 ? u : ~(u | (uint64_t(1) << 63));  // falling
    order[i] = int32_t(i);
  }
  constexpr int kBits = 11;
  for (int shift = 0; shift < 64; shift += kBits) {
    size_t start[1 << kBits] = {};
    for (uint64_t key : keys) start[(key >> shift) & ((1 << kBits) - 1)]++;
    size_t at = 0;
    for (size_t& s : start) at += std::exchange(s, at);
    for (size_t i = 0; i < n; i++) {
      const size_t to = start[(keys[i] >> shift) & ((1 << kBits) - 1)]++;
      other[to] = keys[i], next[to] = order[i];
    }
    keys.swap(other), order.swap(next);
  }
  Candidates sorted{std::vector<int32_t>(n), std::vector<double>(n)};
  for (size_t i = 0; i < n; i++) {
    sorted.ids[i] = c.ids[size_t(order[i])], sorted.scores[i] = c.scores[size_t(order[i])];
  }
  c = std::move(sorted);
}

void keep(Candidates& c, size_t n) { c.ids.resize(n), c.scores.resize(n); }

void truncate(const Isa& isa, const SampleArgs& a, Candidates& c) {
  if (a.top_k > 0 || a.top_p < 1) sort_falling(c);
  if (a.top_k > 0) keep(c, std::min(c.ids.size(), size_t(a.top_k)));
  std::vector<double> mass(c.ids.size());
  auto relative = [&](double to) {
    for (size_t i = 0; i < c.ids.size(); i++) mass[i] = c.scores[i] - to;
    isa.exp64(mass.data(), int(c.ids.size()), mass.data());
  };
  if (a.top_p < 1) {
    relative(c.scores[0]);
    std::partial_sum(mass.begin(), mass.end(), mass.begin());
    const auto end = std::lower_bound(mass.begin(), mass.end(), a.top_p * mass.back());
    keep(c, std::min(c.ids.size(), size_t(end - mass.begin()) + 1));
  }
  if (a.min_p > 0) {
    relative(*std::max_element(c.scores.begin(), c.scores.end()));
    size_t n = 0;
    for (size_t i = 0; i < c.ids.size(); i++)
      if (mass[i] >= a.min_p) c.ids[n] = c.ids[i], c.scores[n++] = c.scores[i];
    keep(c, n);
  }
}

void penalise(const SampleArgs& a, std::vector<double>& scores) {
  std::vector<bool> seen(scores.size());
  auto mark = [&](const int64_t* ids, int64_t n) {
    for (int64_t i = 0; i < n; i++)
      if (ids[i] >= 0 && ids[i] < int64_t(scores.size())) seen[size_t(ids[i])] = true;
  };
  if (a.repetition_penalty != 1) {
    mark(a.prompt, a.prompt_length);
    mark(a.answer, a.answer_length);
    for (size_t i = 0; i < scores.size(); i++)
      if (seen[i])
        scores[i] = scores[i] > 0 ? scores[i] / a.repetition_penalty
                                  : scores[i] * a.repetition_penalty;
  }
  if (a.presence_penalty != 0) {
    seen.assign(scores.size(), false);
    mark(a.answer, a.answer_length);
    for (size_t i = 0; i < scores.size(); i++)
      if (seen[i]) scores[i] -= a.presence_penalty;
  }
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" int edge_sample(const Model* model, const SampleArgs* args) {
  const SampleArgs& a = *args;
  std::vector<double> all(a.logits, a.logits + a.num_tokens);
  penalise(a, all);
  Candidates c;
  if (a.allowed) {
    c.ids.assign(a.allowed, a.allowed + a.num_allowed);
    for (int32_t id : c.ids) c.scores.push_back(all[size_t(id)]);
  } else {
    c.ids.resize(all.size());
    std::iota(c.ids.begin(), c.ids.end(), 0);
    c.scores = std::move(all);
  }
  const auto most = std::max_element(c.scores.begin(), c.scores.end());
  if (a.temperature == 0) return c.ids[size_t(most - c.scores.begin())];
  const double top = *most;
  for (double& s : c.scores) s = (s - top) / a.temperature;
  truncate(*model->isa, a, c);
  std::vector<double> noise(c.ids.size());
  model->isa->gumbel(a.seed, a.position, c.ids.data(), int(c.ids.size()), noise.data());
  for (size_t i = 0; i < noise.size(); i++) noise[i] = c.scores[i] + noise[i];
  const double best = *std::max_element(noise.begin(), noise.end());
  int32_t chosen = -1;
  for (size_t i = 0; i < noise.size(); i++)
    if (noise[i] == best && (chosen < 0 || c.ids[i] < chosen)) chosen = c.ids[i];
  return chosen;
}

#pragma GCC visibility pop
