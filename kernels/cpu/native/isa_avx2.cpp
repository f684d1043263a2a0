#include "types.h"

namespace edge {
const Isa* isa_avx2() { return nullptr; }
}  // namespace edge
