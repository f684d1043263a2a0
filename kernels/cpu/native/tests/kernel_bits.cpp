// Every function of every instruction set that runs here against the scalar definitions, bit by
// bit. One line per group; exits with 1 at a difference. The digest of a group's results is the
// same for all instruction sets and processors.
#include <unistd.h>
#include <csignal>

#include "check.h"

extern "C" int edge_isa_available(const char* name);

namespace {

struct Group {
  const char* name;
  void (*run)(const edge::Isa&, check::Report&);
};

constexpr Group kGroups[] = {
    {"linear", check::linear_cases},     {"quantisers", check::quantiser_cases},
    {"silu_mul", check::silu_cases},     {"rope_kv", check::rope_cases},
    {"attention", check::attention_cases}, {"argmax", check::argmax_cases},
    {"sampling", check::sampling_cases}, {"checksum", check::checksum_cases},
};

char g_now[128];

void stray(int) {  // a read beyond an input meets the page behind it
  const char text[] = ": touches memory outside its arguments\n";
  if (write(2, g_now, std::strlen(g_now)) < 0 || write(2, text, sizeof text - 1) < 0) _exit(3);
  _exit(1);
}

bool run(const Group& group, const std::vector<const edge::Isa*>& isas) {
  check::Report report(group.name);
  uint64_t digest = 0;
  bool agree = true;
  std::string names;
  for (const edge::Isa* isa : isas) {
    std::snprintf(g_now, sizeof g_now, "%s, %s", group.name, isa->name);
    report.begin(isa->name);
    group.run(*isa, report);
    names += std::string(" ") + isa->name;
    if (isa == isas[0]) digest = report.digest();
    agree = agree && report.digest() == digest;
  }
  const bool good = agree && !report.failures();
  std::printf("%-10s %5d cases, digest %016" PRIx64 ", %s:%s\n", group.name, report.cases(), digest,
              good ? "equal" : "DIFFERENT", names.c_str());
  std::fflush(stdout);
  return good;
}

}  // namespace

int main() {
  std::vector<const edge::Isa*> isas;
  for (const edge::Isa* (*get)() :
       {edge::isa_portable, edge::isa_avx2, edge::isa_avx512, edge::isa_dotprod})
    if (const edge::Isa* isa = get())
      if (edge_isa_available(isa->name)) isas.push_back(isa);
  std::signal(SIGSEGV, stray);
  std::signal(SIGBUS, stray);
  bool good = true;
  for (const Group& group : kGroups) good = run(group, isas) && good;
  return good ? 0 : 1;
}
